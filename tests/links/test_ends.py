"""One end of a link by itself: what it checks, remembers and waits for."""

import pytest
import torch
import torch.distributed as dist

from thinpipe.codecs.spec import codec
from thinpipe.comm.errors import ChecksumError
from thinpipe.links.counters import Ledger
from thinpipe.links.link_codec import CodecAdapter
from thinpipe.links.message import CHECKSUM_BYTES, Message, seal
from thinpipe.links.recv import RecvLink
from thinpipe.links.send import SendLink
from thinpipe.links.slot import Route, Slot
from thinpipe.links.transport import transport

CPU = torch.device("cpu")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def route(group, *, sends: bool) -> Route:
    return Route(0, 1, sends, CPU, group)


def test_a_damaged_message_is_not_taken(group):
    receiver = transport(route(group, sends=False), Ledger(), scheduled=False)
    message = Message(3, 1, 0, size=64, buffer=torch.arange(64 + CHECKSUM_BYTES, dtype=torch.uint8))
    seal(message.buffer, 3, 1, 0)
    receiver.accept(message)
    message.buffer[17] ^= 4
    with pytest.raises(ChecksumError, match="chunk 1 of step 3"):
        receiver.accept(message)


def test_every_tensor_of_a_link_has_a_memory_of_its_own(group):
    encoding = CodecAdapter(codec("power:2"))
    encoding.attach(route(group, sends=True))
    encoding.configure([Slot(torch.Size((64, 64)), torch.float32), Slot(torch.Size((32, 128)), torch.float32)])
    for index, slot in enumerate(encoding.slots):
        wire = torch.empty(encoding.wire_format(0, index).wire_bytes, dtype=torch.uint8)
        encoding.encode(0, index, torch.randn(slot.shape), wire)
    assert {key.partition(".")[0] for key in encoding.state_dict()} == {"0", "1"}


def test_a_step_ends_when_everything_sent_has_left(group):
    link, left = SendLink(CodecAdapter(codec("none")), route(group, sends=True), []), []
    link.transport.await_sends = lambda but=0: left.append(but)
    link.finish()
    assert left == [0]


def test_a_returned_buffer_is_reused_by_one_chunk_at_a_time():
    handover, x = {}, torch.randn(64, 64)
    ends = [
        kind(CodecAdapter(codec("uniform:8")), Route(0, 1, kind is SendLink, CPU, None, handover=handover), [])
        for kind in (SendLink, RecvLink)
    ]
    places = []
    for step, returned in enumerate((True, False)):
        for end in ends:
            end.configure([Slot.of(x)], 2)
            end.begin_step(step)
        send, receive = ends
        receive.post()
        for chunk in range(2):
            send.send(chunk, [x])
            places.append(receive.receive(chunk)[0].data_ptr())
            if returned:
                receive.release(chunk)
    assert places[0] == places[1] == places[2] != places[3]
