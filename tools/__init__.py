"""Tools for those who make pmstore: what a GPU has to show, and how a release is built."""
