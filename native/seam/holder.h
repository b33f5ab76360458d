/* A thread that holds the descriptors of locks, in a table of its own.
 *
 * A lock by flock lives as long as any copy of its descriptor, and a fork copies all descriptors
 * of the thread that forks: a trainer that was killed just after it had forked would keep its
 * store locked until its child, which closes its copy, is given a processor. So no other thread
 * of the process has the descriptor: no fork, no vfork and no clone copies it, and the lock is
 * given up with the process, before waitpid tells of its death. Where the system does not allow
 * such a table (before Linux 5.9, or forbidden) the descriptor is the process's, and fork
 * children close it. */
#ifndef PMS_SEAM_HOLDER_H
#define PMS_SEAM_HOLDER_H

#include <sys/stat.h>

/* open, close, fstat and flock, of the holder's descriptors. -1 with errno. */
int pms_holder_open(const char *path, int flags);
void pms_holder_close(int fd);
int pms_holder_stat(int fd, struct stat *st);
int pms_holder_lock(int fd, int how);

void pms_holder_after_fork_in_child(void);

#endif
