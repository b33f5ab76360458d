"""Moving a training program into a store, or binding it to the run that is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pmstore import Store
from pmstore._base.weak_registry import alive
from pmstore.errors import TransactionError
from pmstore.scheduler import CommitPolicy, CommitScheduler, PreemptionGuard
from pmstore.torch._job.join import Joining
from pmstore.torch._job.process_group import Job, job_of, leave_job, warn_of_ranks
from pmstore.torch._migrate.migrate import adapt, note
from pmstore.torch._random.defaults import HeadDraws
from pmstore.torch._state.layout import decode_place, refuse_resharded
from pmstore.torch._state.optimizer_state import parameters_of
from pmstore.torch._state.stateful import Stateful
from pmstore.torch._step.commit_schedule import (
    Schedule,
    check_schedule,
    describe_schedule,
    rule_for,
)
from pmstore.torch._step.foreign_trainers import Schedulers
from pmstore.torch._step.progress import BY_HAND, Progress
from pmstore.torch._step.steps import Steps
from pmstore.torch.keys import called
from pmstore.torch.parts import Pieces
from pmstore.torch.program import Program, check_format
from pmstore.torch.resume import Resume
from pmstore.torch.run import Run
from pmstore.torch.run_errors import AttachError, TornStepError, records

_Piece = TypeVar("_Piece")
_Many: TypeAlias = _Piece | Mapping[str, _Piece] | Sequence[_Piece] | None
_runs: weakref.WeakValueDictionary[int, Steps] = weakref.WeakValueDictionary()
# model or optimizer -> the run that trains it
_trained: weakref.WeakKeyDictionary[Any, weakref.ref[Steps]] = weakref.WeakKeyDictionary()


def attach(
    store: Store,
    *,
    model: _Many[nn.Module] = None,
    optimizer: _Many[Optimizer] = None,
    lr_scheduler: _Many[Stateful] = None,
    scaler: _Many[Stateful] = None,
    loader: Iterable[Any] | None = None,
    stateful: Mapping[str, Stateful | torch.Generator] | None = None,
    policy: CommitPolicy | CommitScheduler | Literal["auto"] | None = "auto",
    tiers: Sequence[str] = (),
    guard: PreemptionGuard | None = None,
    resume: Resume | None = None,
    process_group: Any = None,
    job: Job | None = None,
    mirror: bool | None = None,
    name: str = "run",
    **unknown: NoReturn,
) -> Run:
    """Puts a training run's state into the store, or goes on with the run that is stored there.

    The first time, parameters, buffers and optimizer state are copied into the heap under the group
    `name`, and committed together with everything else that a run depends on. If the store holds a
    run of that name, the program's tensors are bound to the stored ones: no data is read or copied,
    and what the tensors held before is dropped.

    Either way every parameter, buffer and state tensor stays the object it is, and tied parameters
    stay tied. A tensor's memory (`.data`) is the heap from now on, for as long as the tensor lives;
    once the store is closed it is a private copy. On return the run is durable, as far as the
    store's domain reaches. What the program does from then on is kept in steps (see `Run`).

    Tensors on an accelerator are mirrored instead: they stay where they are, and each commit copies
    parameters, buffers and optimizer state into slots of the store (see `Store.mirror`). The device
    copies before it goes on to the next step; the program waits neither for that nor for the store.
    A resume and a roll back copy them back.

    Where a program has several of a kind, it gives a dict of them, `model={"g": g, "d": d},
    optimizer={"g": ..., "d": ...}`, or a list, whose keys are "0", "1", ... They lie under
    `<name>/model/<key>` and `<name>/optimizer/<key>`; the models may share modules and parameters,
    and an optimizer may train parameters of several. A step may have updates of each, or of some.

    Args:
        store: open for writing.
        model: on the CPU or, mirrored, on cuda; or several. What its modules' `get_extra_state`
            returns is kept too. One that no optimizer trains is a model as well: an average of
            weights (`model={"net": net, "ema": AveragedModel(net)}`), a target network.
        optimizer: or several. State that it makes later is moved in as it appears. With a policy,
            the first one's learning rate is the one the policy sees.
        lr_scheduler, scaler: anything with state_dict and load_state_dict whose state is data; or
            several.
        loader: what `run.epochs` and `run.batches` iterate: a DataLoader, a list of batches, or
            anything that can be iterated again.
        stateful: what else the run depends on, under names of its own: generators, metrics. Their
            state is copied at each commit; it does not lie in the heap.
        policy: which steps are committed when they end. "auto": every step where a commit costs
            next to nothing, in memory (the store's domain is not "file"). On a disk when the work
            at risk is worth what a commit costs, both measured; and once a second's work is at
            risk, or more where commits would then take more than 3 % of the time. None: every step.
            Or a rule of `pmstore.scheduler`: Auto(max_loss=0.2), EveryN(100), EverySeconds(60). A
            scheduler is made for it that keeps its state in this store. Or a CommitScheduler of
            your own, whose targets call `store.commit`.
        tiers: names of tiers of the store (`store.add_tier`) that the run flushes to, fastest
            first. With "auto" the scheduler decides when, for each. With another rule
            of pmstore, or none, each is flushed after a commit whenever it is idle. Those with
            `every` flush by themselves.
        guard: notices that the process is told to stop. The end of the step that is open then
            commits it, whatever the policy says, and ends the program with status 0 in place of
            beginning another step. It is entered, as by `with guard:`, until the store is closed.
            In a job all ranks have one, and a notice to one of them ends all, at the same step.
        resume: what to do where the program differs from the one that the stored run was made by:
            other settings (learning rate, batch size, scheduler, data), pieces, layers. None:
            differences are refused. On return it is done, and durable.
        process_group: the ranks that train one model together, each with a store of its own:
            "world", or a group of torch.distributed. All of them call attach. It returns when all
            are at the same step, the newest that every rank can produce; a rank that had committed
            one more goes back. Each commit is then a part of a commit of the job. See
            docs/DISTRIBUTED.md.
        job: the same in its long form, `Job(process_group, timeout)`.
        mirror: True: mirror the tensors, also those on the CPU, which are then not in the heap.
            None: if any parameter is on an accelerator.
        name: of the run's group in the store; several runs can share a store.

    Raises:
        AttachError: something cannot be moved (another device, no data yet), is attached already,
            given twice, or of the wrong kind.
        MismatchError: the stored run is one of another model, optimizer or other pieces; it lists
            the differences, and what to write.
        ChangedError: the same, for settings: what the program gives is not what it gave when the
            run was last attached.
        CorruptStoreError: what is stored is not as a run was stored: the store is damaged, or its
            names were changed.
        TornStepError: the last commit was made in the middle of a step.
        TransactionError: inside a transaction of the store; what is pending in it is half a step.
        StoreFullError: no room.
        MixedStoresError: the ranks' stores have no generation in common. PeerLostError: a rank died
            or did not come. MismatchError and AttachError also where another rank gives another
            program, or could not attach. In a job all of these are raised at every rank.
        InDoubtError: the store is of a job, and was not given process_group.
        TypeError: policy is neither "auto" nor a rule nor a scheduler; resume is no Resume; there
            is no such argument.
        In every case store and program are as before; only where an object refuses the state that
        is stored for it (its `load_state_dict` raises), what `resume` asked for is done in the
        store.
    """
    if unknown:
        raise _unknown(next(iter(unknown)))
    resume = Resume() if resume is None else resume
    rule: CommitPolicy | CommitScheduler | None = None

    def prepare() -> tuple[Program, str]:
        nonlocal rule
        _check_kinds(guard, resume)
        program = Program.gather(
            model=model,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            scaler=scaler,
            stateful=stateful,
            loader=loader,
            mirror=mirror,
        )
        _refuse_beside(store)
        _refuse_twice(name, program)
        _check_store(store, name, tiers)
        rule = rule_for(store, policy, tiers)
        check_schedule(store, rule, tiers, guard, together=ranks is not None)
        with records(store.path, name):  # before ranks compare what they have: that says less
            if (stored := store.get(f"{name}/model_layout")) is not None:
                places = {key: decode_place(raw) for key, raw in stored.items()}
                refuse_resharded(places, program.models)
        schedulers = Schedulers(list(program.optimizers.values()), program.keepers)
        if stored is None:  # a new run, and nothing of it is made yet
            schedulers.look()
        else:
            schedulers.look_early()
        return program, describe_schedule(store, rule, tiers, guard)

    def make(program: Program, first: Callable[[], None] | None = None) -> Steps:
        if f"{name}/about" in store:
            steps = _resume(store, name, program, resume, first)
        else:
            steps = _begin(store, name, program, resume, first)
        try:
            steps.use(Schedule(store, name, steps.progress, rule, tiers, guard))
            steps.course.lives.told |= {"torch": str(torch.__version__), "resume": repr(resume)}
        except BaseException:
            steps.detach()
            raise
        return steps

    ranks = job_of(job, process_group)
    if ranks is None:
        program, _ = prepare()
        leaving = leave_job(store, name)
        warn_of_ranks()
        resumed = f"{name}/about" in store
        steps = make(program, leaving)
    else:
        joining = Joining(store, name, ranks.peers())
        program, described = joining.tell(prepare)
        steps, resumed = joining.begin(lambda first: make(program, first))
        steps.job = joining.membership(described, steps.schedule.join())
    _runs[id(steps)] = steps
    for piece in (*program.models.values(), *program.optimizers.values()):
        _trained[piece] = weakref.ref(steps)
    return Run(steps, resumed=resumed)


def _unknown(argument: str) -> TypeError:
    known = [name for name in signature(attach).parameters if name not in ("store", "unknown")]
    meant = get_close_matches(argument, known, 1)
    asked = f" Did you mean {meant[0]!r}?" if meant else ""
    return TypeError(f"attach has no argument {argument!r}.{asked} It has {', '.join(known)}")


def _check_kinds(guard: Any, resume: Any) -> None:
    if guard is not None and not isinstance(guard, PreemptionGuard):
        given = repr(guard) if isinstance(guard, str) else "..."
        raise TypeError(
            f"guard is a PreemptionGuard of pmstore.scheduler, not {guard!r}: write "
            f"guard=PreemptionGuard({given})"
        )
    if not isinstance(resume, Resume):
        raise TypeError(f"resume is a pmstore.torch.Resume(...), not {resume!r}")


def _check_store(store: Store, name: str, tiers: Sequence[str]) -> None:
    if isinstance(tiers, str) or not all(isinstance(tier, str) for tier in tiers):
        raise TypeError(f"tiers={tiers!r}: a list of names of tiers, such as ['disk']")
    unknown = [tier for tier in tiers if tier not in store.tiers]
    if unknown:
        raise AttachError(
            f"the store has no tier {unknown[0]!r}: store.add_tier({unknown[0]!r}, url) adds one"
        )
    if store.in_transaction:
        raise TransactionError(
            "attach inside a transaction of the store: call it outside, it commits by itself"
        )
    if store.mode == "r":
        raise AttachError(
            "the store is open for reading, and a run writes: open it with mode='r+'. To read a "
            f"stored model, use store['{name}/model'], which maps names to tensors"
        )


def _begin(
    store: Store, name: str, program: Program, resume: Resume, first: Callable[[], None] | None
) -> Steps:
    """A new run. The program is bound after the commit: if that fails, it has not been touched.

    first: writes what else is to be committed with it."""
    pieces = Pieces(store, name, program)
    with store.transaction() if first is None else _committing(store):
        progress = Progress.create(store, name)
        pieces.create(progress.place)
        progress.capture(0)
        store[f"{name}/about"] = {
            "format": program.format,
            "torch": str(torch.__version__),
            "pieces": program.given(),
        }
        note(store, name, program, resume)
        HeadDraws(store, f"{name}/heads").begin(0)
        if first is not None:
            first()
    steps = Steps(store, name, pieces, progress)
    steps.bind(resumed=False)
    return steps


def _resume(
    store: Store, name: str, program: Program, resume: Resume, first: Callable[[], None] | None
) -> Steps:
    """The stored run. Everything is compared before the program is touched.

    first: writes what else is to be committed with what `resume` asks for."""
    with records(store.path, name):
        check_format(store, name)
        progress = Progress.open(store, name)
        if progress.torn:
            raise TornStepError(
                f"the last commit of {name!r} was made in the middle of a training step (after "
                "run.detach(), or by another thread's transaction, between optimizer.step() and "
                "run.commit()), so that what the step had not yet written is lost. The tensors "
                f"under {name}/model are whole: load them into a new run, or restore an older state"
            )
        if first is None:
            changed = adapt(store, name, program, resume)
            pieces = _checked(store, name, program)
        else:
            # Mirrors of the program's own would be committed when the block begins, and a job's
            # store could not commit again when it is left.
            aside = nullcontext() if store._mirrors is None else store._mirrors.aside()
            with aside, store.transaction():
                changed = adapt(store, name, program, resume)
                pieces = _checked(store, name, program)
                first()
        for binding in pieces.bindings:
            binding.open()
        steps = Steps(store, name, pieces, progress)
        steps.course.lives.told["changed"] = changed
        steps.bind(resumed=True)
        if progress.loops:
            # whether steps by hand are left is not known: their head goes on where the run is
            if progress.loops[0].kind != BY_HAND:
                steps.heads.begin_again(0)
        elif f"{name}/loops" in store and not steps.heads.knows(0):  # see `Progress.forget_loops`
            steps.heads.begin(0)
    return steps


def _checked(store: Store, name: str, program: Program) -> Pieces:
    """Raises: MismatchError."""
    pieces = Pieces(store, name, program)
    pieces.check()
    return pieces


@contextmanager
def _committing(store: Store) -> Iterator[None]:
    """Commits as a transaction block does, but does not begin with a commit of mirrors: a job's
    store could not commit again when it is left. REQUIRES: nothing else is pending."""
    try:
        yield
        store.commit()
    except BaseException:
        store.rollback()
        raise


def _refuse_twice(name: str, program: Program) -> None:
    if not name or not isinstance(name, str):
        raise AttachError(f"name is the name of the run's group in the store, not {name!r}")
    pieces: dict[str, Any] = {called("model", key): one for key, one in program.models.items()}
    pieces |= {called("optimizer", key): one for key, one in program.optimizers.items()}
    for what, piece in pieces.items():
        run_of = _trained.get(piece)
        other = run_of() if run_of is not None else None
        if other is not None and other.attached:
            raise AttachError(
                f"{what} is attached already, as {other.name!r}: its memory can be in one "
                "place only. Call that Run's detach() first"
            )
    mine = {id(one) for model in program.models.values() for one in model.parameters()}
    for optimizer in program.optimizers.values():
        mine.update(map(id, parameters_of(optimizer)))
    for run in alive(_runs):
        shared = (
            next((key for key, one in run.pieces.parameters() if id(one) in mine), None)
            if run.attached
            else None
        )
        if shared is not None:
            raise AttachError(
                f"the parameter {shared!r} is attached already, with another model or optimizer, "
                f"as {run.name!r}: its memory can be in one place only. Call that Run's detach() "
                "first"
            )


def _refuse_beside(store: Store) -> None:
    """All that is in a store is committed and taken back together, and a process has one set of
    default generators: a run that goes back would take another one's steps along."""
    for run in alive(_runs):
        if run.attached and run.store is store:
            raise AttachError(
                f"the run {run.name!r} of this store is attached already, and a store has one run "
                "at a time, as all that is in it is committed and taken back together. Use that "
                "Run, or call its detach() first. What trains together is one run, "
                "attach(model={...}, optimizer={...}); what trains beside it has a store of its own"
            )
