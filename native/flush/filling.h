/* A new file in memory (tmpfs), filled through a mapping: what is read from a disk lands where
 * it stays, without a copy, on huge pages where the kernel gives some. A page of 4 KiB costs
 * more to allocate, zero and write by system call than a disk needs to deliver it. */
#ifndef PMS_FLUSH_FILLING_H
#define PMS_FLUSH_FILLING_H

#include <stdint.h>

#include "base/status.h"

struct pms_filling;
struct pms_transfer;

/* Makes the file that long. *fill = NULL, and no more than that was done, if it is not in
 * memory, there is no address space for it (RLIMIT_AS), or the kernel cannot tell a full file
 * system from a fault (before Linux 5.14): fill it by system calls then. fd stays the caller's.
 * ERRORS: PMS_E_OS. */
int pms_filling_open(int fd, uint64_t file_bytes, struct pms_filling **fill,
                     struct pms_error *error);
void pms_filling_close(struct pms_filling *f);
uint64_t pms_filling_bytes(const struct pms_filling *f);
unsigned char *pms_filling_at(const struct pms_filling *f, uint64_t off);

/* Makes sure of room for a range: it may be stored to afterwards, whoever fills the file system
 * then. Any thread, several at once, of any ranges; what has room is left alone. filled: it will
 * be stored to now. Other room is only set aside: its memory is touched where that takes less, and
 * not where a virtual machine has to be given it, which may cost much more than to zero it.
 * transfer: only to cancel.  ERRORS: PMS_E_FULL, PMS_E_OS; PMS_E_STATE: cancelled. */
/* room is made in blocks of so many bytes: each call of madvise waits for all cores */
#define PMS_FILLING_BLOCK (16ull << 20)
int pms_filling_room(struct pms_filling *f, uint64_t off, uint64_t bytes, int filled,
                     const struct pms_transfer *transfer, struct pms_error *error);

#endif
