"""The transfer of tensors from the client to the servers that load them, while the client loads its own.

    server                                               client: a thread for each server
    {"folder": "model", "total": 90000000,
     "blocks": [[NAME, 3, false], [NAME, 4, true]]}    ->
                                                       <-  {"hashes": [SHA-256 of blocks 3 and 4 of this tensor]}
                                                       <-  the bytes of block 4
    ... further requests ...
    {"done": true}                                     ->

The flag is false for a block that the server has. It compares the hash, so content that only looks the same is found;
and a client gets the use of a cached tensor only if it has the same content. Requests grow while they take less than
_REQUEST_S, so that an interrupted transfer loses seconds. All messages have the tag ``FILE_TAG``.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinpipe.comm.control import ACTIVITY, waiting
from thinpipe.comm.errors import LinkError
from thinpipe.comm.group import FILE_TAG, Group
from thinpipe.comm.streams import bytes_of, fill_tensors, memory_of
from thinpipe.system.sanitize import first_line, one_line
from thinpipe.system.sizes import size_text
from thinpipe.system.tensors import spec_bytes
from thinpipe.train.models.adapters import ADAPTER_FILE, plain_name
from thinpipe.train.models.remote import InFiles
from thinpipe.train.models.weights import open_tensors, weight_files
from thinpipe.train.serve.file_manifest import FolderFiles
from thinpipe.train.serve.model_cache import BLOCK, CachedFolder, block_count

Report = Callable[[str], None]  # prints a line
Block = tuple[str, int, int]  # tensor, number, bytes
ReadBlock = Callable[[str, int], Tensor]  # of a tensor and a number
_REQUEST_S, _MOST_SENT = 2.0, 16 * BLOCK  # seconds and bytes of a request
_COMPARED = 16  # blocks that are only compared cost as much as one that is sent, at about 1 Gbit/s
_MOST_BLOCKS = 10_000  # of a request
_SAVE_S, _PROGRESS_S = 5.0, 3.0
_MOST_ASKED = 4  # times the bytes of the manifest: a server compares its copy, its cache, and fetches what differs


@contextmanager
def open_blocks(folder: Path, files: FolderFiles) -> Iterator[ReadBlock]:
    """Yield a function that returns a block of a tensor, memory-mapped; ValueError if it is not as described."""
    with ExitStack() as opened:
        holders: dict[str, Any] = {}
        for path in [folder / ADAPTER_FILE] if files.weight_file == ADAPTER_FILE else weight_files(folder):
            tensors = opened.enter_context(open_tensors(path))
            holders |= dict.fromkeys(tensors.keys(), tensors)

        def read(name: str, number: int) -> Tensor:
            found = bytes_of(holders[name].get_tensor(name)) if name in holders else None
            if found is None or found.numel() != spec_bytes(files.tensors[name]):
                raise ValueError(f"{folder} has another {name} than before: it was changed since the run began")
            return found[number * BLOCK : (number + 1) * BLOCK]

        yield read


def hash_of(content: Tensor | bytes) -> str:
    return sha256(content if isinstance(content, bytes) else memory_of(content)).hexdigest()


class Granted:
    """The tensors of one folder of the client that each server may request: those of its layers."""

    def __init__(self, files: FolderFiles) -> None:
        self._tensors = list(files.tensors)
        self._of_all: set[str] = set()
        self._of_worker: defaultdict[int, set[str]] = defaultdict(set)
        self._known = threading.Event()

    def grant(self, wanted: Collection[str], in_files: InFiles, parts: Mapping[int, Collection[str]]) -> None:
        """Note what the client is about to load, and with that what belongs to the parts of the servers."""
        for worker, names in parts.items():
            # Names in a file of weights lack what adapters have added.
            is_own = in_files({*names, *map(plain_name, names)})
            self._of_worker[worker].update(filter(is_own, self._tensors))
        if not parts:  # every worker loads the same
            self._of_all.update(filter(in_files(wanted), self._tensors))
        self._known.set()

    def close(self) -> None:
        """Grant nothing more: the client has loaded its layers, or the run has ended."""
        self._known.set()

    def has(self, worker: int, tensor: str) -> bool:
        """Return True if a server may have a tensor; wait until the client knows."""
        self._known.wait()
        return tensor in self._of_all or tensor in self._of_worker[worker]


Folder = tuple[Path, FolderFiles, Granted]


class FileService:
    """The client's answers to one server, in a thread that ends when the server has loaded its layers."""

    def __init__(self, group: Group, server: int, folders: Mapping[str, Folder], report: Report) -> None:
        self._group, self._server, self._folders, self._report = group, server, folders, report
        self._left = _MOST_ASKED * sum(files.bytes for _, files, _ in folders.values()) + BLOCK
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._announced: set[str] = set()  # folders of which a line was printed
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"thinpipe-files-{server}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server has loaded its layers; raise the error that has ended the service."""
        with waiting():
            self._ended.wait()
        if self._error is not None:
            raise self._error

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with ExitStack() as opened:
                readers: dict[str, ReadBlock] = {}
                while (request := self._group.receive_json(self._server, tag=FILE_TAG)) != {"done": True}:
                    self._answer(request, readers, opened)
        except LinkError as error:  # raised by ``wait``, in the main thread
            self._error = error
        except Exception as error:  # of a message that is no JSON, or nested too deeply
            self._error = ValueError(f"worker {self._server} sent no request for tensors: {first_line(error)}")
        finally:
            self._ended.set()

    def _answer(self, request: Any, readers: dict[str, ReadBlock], opened: ExitStack) -> None:
        """Answer one request; a rejected one ends the run, and the server receives the reason."""
        try:
            if self._error is not None:
                raise self._error
            name, asked = self._checked(request)
            if name not in readers:
                readers[name] = opened.enter_context(open_blocks(*self._folders[name][:2]))
            blocks = [(readers[name](tensor, number), flag) for tensor, number, flag in asked]
        except ValueError as error:
            self._error = error
            self._send({"problem": str(error)})
            self._ended.set()  # the main thread raises the error; this one goes on until the server is done
            return
        self._send({"hashes": [hash_of(block) for block, _ in blocks]})
        sent = [block for block, flag in blocks if flag]
        self._group.send_pieces(sent, self._server, tag=FILE_TAG)
        self.sent_bytes += sum(block.numel() for block in sent)

    def _send(self, facts: Any) -> None:
        self._group.send_json(facts, self._server, tag=FILE_TAG)

    def _checked(self, request: Any) -> tuple[str, list[tuple[str, int, bool]]]:
        """Return folder and blocks of a request; raise ValueError unless the manifest has all of them."""
        try:
            name, total = request["folder"], request["total"]
            _, files, granted = self._folders[name]
            asked = [(str(tensor), number, bool(flag)) for tensor, number, flag in request["blocks"]]
            sizes = [_block_bytes(files, tensor, number) for tensor, number, _ in asked]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"worker {self._server} asked for tensors that are not among the run's files: {ascii(error)[:200]}"
            ) from None
        other = next((tensor for tensor, *_ in asked if not granted.has(self._server, tensor)), None)
        if other is not None:
            raise ValueError(f"worker {self._server} asked for a tensor of other layers than its own: {other}")
        self._left -= sum(sizes)
        if self._left < 0 or sum(size for size, (*_, flag) in zip(sizes, asked, strict=True) if flag) > _MOST_SENT:
            raise ValueError(f"worker {self._server} asked for more tensors than it can need")
        if type(total) is int and 0 < total <= files.bytes and name not in self._announced:
            self._announced.add(name)
            self._report(f"worker {self._server} needs {size_text(total)} of weights of the {name}: sending them")
        return name, asked


def _block_bytes(files: FolderFiles, name: str, number: int) -> int:
    size = spec_bytes(files.tensors[name])
    if type(number) is not int or not 0 <= number < block_count(size):
        raise IndexError(f"{name} has no block {number}")
    return min(BLOCK, size - number * BLOCK)


class FetchedFolder:
    """The tensors of one folder on a server: from its own copy if that has the client's, else from the cache."""

    def __init__(self, name: str, cached: CachedFolder, own: list[Path], group: Group, report: Report) -> None:
        self.name, self.digest, self.received_bytes = name, cached.files.digest, 0
        self._cached, self._own, self._group, self._report = cached, own, group, report
        self._request_bytes = BLOCK

    def fetch(self, is_wanted: Callable[[str], bool]) -> Path:
        """Return the folder to read the wanted tensors from, all compared with the client's by hash."""
        files, cached = self._cached.files, self._cached
        blocks = [
            (name, number, _block_bytes(files, name, number))
            for name, spec in files.tensors.items()
            if is_wanted(name)
            for number in range(block_count(spec_bytes(spec)))
        ]
        if not blocks:
            return cached.folder
        for folder in self._own:
            if self._is_same(folder, blocks):
                return folder
        try:
            changed = self._receive(blocks)
            if changed:
                self._report(f"{len(changed)} blocks in {cached.folder} are not the client's: fetching them again")
                self._receive(changed)
        finally:
            cached.save()
        return cached.folder

    def _is_same(self, folder: Path, blocks: list[Block]) -> bool:
        """Return True if all these blocks are in a folder of this machine."""
        size = size_text(sum(size for _, _, size in blocks))
        self._report(f"comparing {size} of weights in {folder} with the client's {self.name}")
        with open_blocks(folder, self._cached.files) as read:
            differing = {
                name
                for (name, number, _), theirs, _ in self._exchange([(block, False) for block in blocks])
                if hash_of(read(name, number)) != theirs
            }
        if differing:
            count = len({name for name, _, _ in blocks})
            self._report(f"{folder} is not used: {len(differing)} of {count} tensors differ from the client's")
        return not differing

    def _receive(self, blocks: list[Block]) -> list[Block]:
        """Fetch the blocks that are not in the cache; return those in it that differ from the client's."""
        cached, changed, what = self._cached, [], f"the {self.name}"
        asked = [(block, not cached.present[block[0]][block[1]]) for block in blocks]
        total, done = sum(block[2] for block, is_missing in asked if is_missing), 0
        cached.cache.reserve(total, what)
        began = shown = saved = time.monotonic()
        for block, theirs, content in self._exchange(asked):
            name, number, size = block
            if content is None:
                if hash_of(cached.read(name, number)) != theirs:
                    cached.present[name][number] = 0
                    changed.append(block)
                continue
            if hash_of(content) != theirs:
                raise ValueError(f"{name} was changed on its way from the client; try again")
            cached.write(name, number, memory_of(content))
            done, now = done + size, time.monotonic()
            if now - saved >= _SAVE_S:
                cached.save()
                cached.cache.reserve(total - done, what)  # another run may have filled the disk
                saved = now
            if now - shown >= _PROGRESS_S or done == total:
                rate = size_text(int(done / max(now - began, 1e-3)))
                self._report(f"weights of {what}: {size_text(done)} of {size_text(total)}, {rate}/s")
                shown = now
        return changed

    def _exchange(self, asked: list[tuple[Block, bool]]) -> Iterator[tuple[Block, str, Tensor | None]]:
        """Yield blocks with the client's hashes, and with their bytes if these are asked for."""
        total = sum(block[2] for block, is_missing in asked if is_missing)
        while asked:
            costs = (block[2] if is_missing else block[2] // _COMPARED for block, is_missing in asked[:_MOST_BLOCKS])
            count = max(1, sum(cost <= self._request_bytes for cost in accumulate(costs)))
            now, asked = asked[:count], asked[count:]
            ACTIVITY.note("receiving weights")
            began = time.monotonic()
            named = [[name, number, is_missing] for (name, number, _), is_missing in now]
            self._group.send_json({"folder": self.name, "total": total, "blocks": named}, 0, tag=FILE_TAG)
            hashes = self._hashes(count)
            buffers = [torch.empty(block[2], dtype=torch.uint8) for block, is_missing in now if is_missing]
            size = sum(buffer.numel() for buffer in buffers)
            contents = fill_tensors(buffers, self._group.receive_pieces(size, 0, tag=FILE_TAG))
            received = iter(list(contents))  # all of them, before an error of the disk can leave some unread
            self.received_bytes += size
            if time.monotonic() - began < _REQUEST_S:
                self._request_bytes = min(2 * self._request_bytes, _MOST_SENT)
            for (block, is_missing), theirs in zip(now, hashes, strict=True):
                yield block, theirs, next(received) if is_missing else None

    def _hashes(self, count: int) -> list[Any]:
        answer = self._group.receive_json(0, tag=FILE_TAG)
        if isinstance(answer, dict) and "problem" in answer:
            raise ValueError(f"the client: {one_line(str(answer['problem']))[:500]}")
        hashes = answer.get("hashes") if isinstance(answer, dict) else None
        if not isinstance(hashes, list) or len(hashes) != count:
            raise ValueError("the client did not answer a request for tensors: use the same version of thinpipe")
        return hashes
