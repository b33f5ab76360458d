"""Jobs of several ranks: each has a store of its own, and all reopen at the same step.

board.py         what they say of themselves beside it: how far each has come, why one ended
peers.py         the ranks, over a gloo group of their own: gather, tickets
generations.py   what a rank's store can produce; the newest that all can
records.py       what is read of them without the program
ticket.py        what ranks tell each other after a commit
meetings.py      at which steps they do, and what they agree on for the next one
membership.py    this rank's part in the job while its run trains
"""
