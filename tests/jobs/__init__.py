"""Jobs of several ranks as people write them, whose ranks are killed, stopped and cut off.

    python -m crashtests --kind jobs                  all of them, in each domain: minutes
    python -m crashtests --kind jobs --only local     those whose names contain the word
    pytest tests/job/test_job_*.py                    a choice; bad input; stopped ranks

Each job is run once without disturbance. Then its ranks are killed by SIGKILL, again and again, and
after each kill the job is started again on what is left, by hand or by torchrun. `harness.py` does
it and says what has to hold; `life.py` is one rank's life; `server.py` forks the ranks.

To add a job, write a function into `training.py`, as a user would write the program of one rank:

    @job(worlds=(2, 3))
    def mine(folder):
        rank = dist.get_rank()
        ...
        with pmstore.open(f"{folder}/run{rank}.pm") as store:
            run = pmstore.torch.attach(store, model=model, ..., **JOB)
            for x, y in run.batches(epochs=3):
                ...
                run.log(loss=loss)
            return {"model": model, "optimizer": optimizer}

It has to end with the same bits whenever it is run.
"""

import sys
from pathlib import Path

# What the programs of one rank have (moments, data, bits) is shared: `programs` lies beside this
# package, whether that is called `jobs` or `tests.jobs`.
_beside = str(Path(__file__).resolve().parents[1])
if _beside not in sys.path:
    sys.path.insert(0, _beside)
