"""Programs about pmstore, installed with it: it imports nothing of them.

demo.py, demo_trainer.py   training that is killed and resumed: `pmstore demo`
simulation/                commit policies in simulated time: `pmstore schedule simulate`
commands/                  the two; `pmstore` finds them by its entry points `pmstore.commands`
"""
