"""Links: what one stage sends to its neighbour in one direction, in layers.

       SendLink (stage 0)                                 RecvLink (stage 1)

                                                     (1)  post: one irecv per chunk and tensor, at the start of a step
  (2)  send: encode into a wire, isend  ---- wire --->    arrives while the worker computes something else
                                                     (3)  receive: wait for it, decode
  (4)  finish: all sends of the step are out         (5)  release: the decoded tensors may be used again

(1) is why transfers hide behind compute: gloo moves no data until the receiver has posted. Each message has its own
tag, so nothing depends on the order of messages and no order can deadlock.

    stage         torch's calls
    ends          the up to four ends of links that a stage has
    send, recv    the two ends: (1) to (5), and what they count
    encoding      what travels: a codec, changes against copies of samples, learned axes (spec, delta, axes)
    transport     how it travels: on its own, through pinned memory, or in the order of a schedule
    memory        where wires lie for it
    message       one tensor of one chunk on its way: its integers packed, its checksum
    slot          shapes, tags, limits

Times. ``blocked_ms`` is the time from (3), when the stage first needs a chunk, until it can use the wire. A message
carries nothing but its wire, so the receiver alone cannot tell a late sender from a slow link: both ends keep stamps,
and ``report`` compares them.
"""
