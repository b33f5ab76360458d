"""What a transaction on a small array costs from Python, beside np.savez of the same array."""

from __future__ import annotations

import numpy as np

import pmstore
from benchmarks.harness import Method, Row, measure, report, scratch

TIMES = 500


def main(quick: bool = False) -> None:
    rows: list[Row] = []
    with scratch("memory") as folder:
        for domain in ("process", "emulated"):
            with pmstore.open(folder / domain, size="64MiB", domain=domain) as store:
                declared, hot = store.zeros("declared", 16, "float64"), store.zeros("hot", 16, "float64")

                def run_declared(store: pmstore.Store = store, a: np.ndarray = declared) -> None:
                    for i in range(TIMES):
                        with store.transaction(writes=[a]):
                            a[0] = i

                def run_hot(store: pmstore.Store = store, a: np.ndarray = hot) -> None:
                    for i in range(TIMES):
                        with store.transaction():
                            a[0] = i

                def run_value(store: pmstore.Store = store) -> None:
                    for i in range(TIMES):
                        store["step"] = i
                        store.commit()

                def run_savez(a: np.ndarray = declared, path: str = str(folder / "a.npz")) -> None:
                    for _ in range(TIMES // 50):
                        np.savez(path, a=np.asarray(a))

                methods = [
                    Method("with transaction(writes=[a]): a[0] = x", domain, run_declared),
                    Method("with transaction(): a[0] = x   (hot)", domain, run_hot),
                    Method("store['step'] = i; commit()", domain, run_value),
                ]
                rows += measure(f"small write + commit, {domain}", methods, 9 if quick else 31, methods[0].name, 3, TIMES)
                savez = Method("np.savez", "torn", run_savez)
                rows += measure(f"np.savez of the same array, {domain}", [savez], 9, savez.name, 1, TIMES // 50)
    report("block", "A transaction from Python (targets: declared <= 4 us, hot <= 6 us)", rows)
