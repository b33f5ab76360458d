"""Training programs as people write them, killed and stopped in the middle of their steps.

    python -m crashtests --kind programs               all of them: minutes
    python -m crashtests --kind programs --only gan    those whose names contain the word
    pytest tests/training/test_programs.py             a short choice

Each program is run on plain torch, undisturbed, killed by SIGKILL, stopped by SIGTERM with
`sys.exit(0)` in the handler, by an exception, and by `break`: at places drawn from a seed, each
life going on where the last one ended. What it returns, and the default generators, must come out
bit for bit the same each time. `harness.py` does it, `life.py` is one life.

To add one, write a function into one of the files here, as a user would write the program:

    @program()
    def mine(path):
        model, loader = mlp(), batches()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pmstore.open(path) as store:
            run = pmstore.torch.attach(store, model=model, optimizer=optimizer, loader=loader)
            losses = store.list("losses")
            for x, y in run.batches(epochs=3):
                ...
                losses.append(loss.item())
                run.log(loss=loss)
            return {"model": model, "optimizer": optimizer, "losses": list(losses)}

20 to 60 steps, less than a second, everything seeded (the default generators are, by the harness).
The harness puts a *moment* before each statement of the function, at which it can kill or stop it;
so what makes up a step is written there, and not in a helper. `@program("a", "b")` makes two
variants, whose names are the second argument. `plain="why"` says why plain torch gives another
result; `stops=` leaves out kinds of stops that the program itself cannot bear; `refused=` is what
the error says by which the program is refused, undisturbed; `quick=True` puts it into the short
choice. A `break` in the middle of a step says nothing of the step: the program ends
with `UnfinishedStepError`, and its next life does the step again.
"""
