"""Jobs of several ranks: each has a store of its own, and all reopen at the same step.

board.py         what they say of themselves beside it: how far each has come, why one ended
peers.py         the ranks, over a gloo group of their own: gather, tickets
ticket.py        what ranks tell each other after a commit
meetings.py      at which steps they do, and what they agree on for the next one
membership.py    this rank's part in the job while its run trains

What stores say of generations is in `pmstore/objects/generations.py` and `job_record.py`; how ranks
join is in `pmstore/torch/_job/join.py`. docs/DISTRIBUTED.md says how it works.
`crashtests/protocol.py` tries all interleavings of the protocol.
"""
