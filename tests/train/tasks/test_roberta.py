"""The word tokenizer: RoBERTa's layout, cut to length."""

from __future__ import annotations

from thinpipe.train.tasks.roberta import END, PADDING, SPECIAL, START, UNKNOWN, WordTokenizer


def test_a_text_and_a_pair_are_laid_out_as_roberta_has_them() -> None:
    tokenizer = WordTokenizer(["a", "b"])
    ids, mask = tokenizer.encode([("A b!",), ("a", "b")], 8)
    a, b = SPECIAL, SPECIAL + 1
    assert ids.tolist() == [
        [START, a, b, UNKNOWN, END, PADDING, PADDING, PADDING],
        [START, a, END, END, b, END, PADDING, PADDING],
    ]
    assert mask.tolist() == [[1] * 5 + [0] * 3, [1] * 6 + [0] * 2]


def test_long_samples_lose_the_end_of_the_longer_text() -> None:
    tokenizer = WordTokenizer("abcdef")
    ids, _ = tokenizer.encode([("a b c d", "e f")], 8)
    a, b, _, _, e, f = range(SPECIAL, SPECIAL + 6)
    assert ids.tolist() == [[START, a, b, END, END, e, f, END]]


def test_a_vocabulary_of_texts_keeps_the_most_frequent_words() -> None:
    tokenizer = WordTokenizer.of_texts(["the cat", "the dog, the cat"], most=2)
    assert tokenizer.vocabulary == SPECIAL + 2
    ids, _ = tokenizer.encode([("the cat dog",)], 5)
    assert ids.tolist() == [[START, SPECIAL, SPECIAL + 1, UNKNOWN, END]]
