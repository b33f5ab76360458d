"""Plug-ins for training frameworks: a module for each, which imports the framework itself.

None of them is needed to import pmstore; none is imported here.
"""
