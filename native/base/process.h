/* What belongs to this process and to no fork child: open stores, and descriptors that would
 * keep a dead trainer's lock alive. */
#ifndef PMS_BASE_PROCESS_H
#define PMS_BASE_PROCESS_H

#include <stdint.h>
#include <sys/types.h>

/* What runs around every fork from now on: in the parent, before and after it, and in the child,
 * after its copies of the descriptors below are closed. Once; later calls do nothing. */
struct pms_fork_hooks {
    void (*before)(void), (*in_parent)(void), (*in_child)(void);
};
void pms_process_prepare(const struct pms_fork_hooks *hooks);

/* open(2), socket(2) and close(2) of a descriptor that no fork child keeps, not even one forked by
 * another thread between the two halves of either. O_CLOEXEC is added. -1 with errno. */
int pms_process_open(const char *path, int flags, mode_t mode);
int pms_process_socket(int domain, int type);
void pms_process_close(int fd);

/* The beginning of a file that tells of the system, as a text; its bytes. -1 with errno, and an
 * empty one. */
ssize_t pms_process_read(const char *path, char *text, size_t room);

/* Differs in a fork child from what it was in the parent. */
uint64_t pms_process_generation(void);

#endif
