"""The course of a training run: losses, times, commits and decisions, in bounded room in its store.

It is kept in the group `pmstore.course`, and is committed with the user's state: so it is the
course that led to that state, after a crash, a roll back or a rewind as well.
"""

from pmstore.course.reader import Decided, Start, Told, read
from pmstore.course.recorder import Course

__all__ = ["Course", "Decided", "Start", "Told", "read"]
