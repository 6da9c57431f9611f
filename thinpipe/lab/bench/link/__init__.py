"""The link benchmark: how long messages of every size take between two workers, and what codecs make of that."""
