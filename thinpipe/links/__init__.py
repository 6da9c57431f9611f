"""Links: tensors sent from one stage to a neighbour stage in one direction, in layers.

       SendLink (stage 0)                                 RecvLink (stage 1)

                                                     (1)  post: one irecv per chunk and tensor, at the start of a step
  (2)  send: encode into a wire, isend  ---- wire --->    arrives while the worker computes something else
                                                     (3)  receive: wait for it, decode
  (4)  finish: all sends of the step are out         (5)  release: the decoded tensors may be used again

Because of (1), transfers overlap with computation: gloo moves no data until the receive is posted. Each message has its
own tag, so the order of messages does not matter and no order can deadlock.

    stage         torch's calls
    stage_links   the up to four link ends of a stage
    send, recv    the two ends: (1) to (5), and their counters
    link_codec    the payload: a codec, samples that are sent once (activation_cache), rows in a PCA basis (learned)
    transport     the sends and receives: direct, through pinned memory, or in the order of a schedule
    memory        the buffers of wires
    message       one tensor of one chunk in transit: integer packing, checksum
    slot          shapes, tags, limits

Times. ``blocked_ms`` is the time from (3), when the stage first needs a chunk, until it can use the wire. A message
carries only its wire, so the receiver alone cannot distinguish a late sender from a slow link: both ends record time
stamps, and ``report`` compares them.
"""
