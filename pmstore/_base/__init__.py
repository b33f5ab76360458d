"""Small things that know nothing of the store: words, files, threads, output for notebooks.

sizes.py          sizes that people write: "4GiB"
text.py           how numbers and names are said
notebook.py       tables in HTML
weak_registry.py  objects by a key, as long as somebody holds them
workers.py        threads: starting them, waiting for them, telling how far they are
newfile.py        files that appear whole or not at all
untrusted.py      what a stranger's bytes may raise
"""
