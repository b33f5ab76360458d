/* The seam: every store the engine makes to the file, every write-back, fence, sync and file
 * operation.
 *
 * In the byte-addressable domains the medium is memory: copy + flush + fence. In domain file it
 * is a file: pwrite + fdatasync. A crash test sees the whole life of a store by hooking this
 * seam (pms_persist_hook). */
#ifndef PMS_SEAM_PERSIST_H
#define PMS_SEAM_PERSIST_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "base/status.h"

enum pms_flush {
    PMS_FLUSH_NONE = 0, /* store order alone: survives the process, not the machine */
    PMS_FLUSH_CLFLUSH = 1,
    PMS_FLUSH_CLFLUSHOPT = 2,
    PMS_FLUSH_CLWB = 3,
    PMS_FLUSH_CVAP = 4, /* aarch64: dc cvap, to the point of persistence */
    /* aarch64 without it: dc cvac, to the point of coherence, which is then as far as a line can
     * be told to go */
    PMS_FLUSH_CVAC = 5,
};

struct pms_persist {
    enum pms_flush flush;
    uint64_t fences; /* counters: golden counts and stats */
    uint64_t lines;  /* written back by flush, and by non-temporal copies */
    /* of several threads: the program's, its fault handlers, one that closes */
    _Atomic uint64_t syncs;        /* fdatasync, msync */
    _Atomic uint64_t failed_syncs; /* each leaves unknown what is durable */
    uint32_t log_seed; /* pms_session_seed of the session whose logs are read or written */
};

/* What another thread, or work outside a lock, counted by itself. */
static inline void pms_persist_add(struct pms_persist *to, const struct pms_persist *from)
{
    to->fences += from->fences;
    to->lines += from->lines;
}

enum pms_primitive {
    PMS_PRIM_STORE = 1, /* addr, bytes */
    PMS_PRIM_FLUSH = 2, /* addr, bytes */
    PMS_PRIM_FENCE = 3,
    PMS_PRIM_PWRITE = 4, /* offset as addr, bytes */
    PMS_PRIM_SYNC = 5,
    PMS_PRIM_PROTECT = 6,  /* addr, bytes */
    PMS_PRIM_ALLOCATE = 7, /* fallocate, ftruncate: offset as addr, bytes */
    PMS_PRIM_COPY = 8,     /* non-temporal copy or zero: addr, bytes */
    PMS_PRIM_MAP = 9,      /* a view of the file from offset 0, or the growth of one: addr, bytes */
};

/* Called before each primitive when set: crash tests kill, count, trace or fail here. A non-zero
 * return makes a file operation fail with that errno; it is ignored for memory operations.
 * Async-signal-safe, may not fault on the store. */
typedef int pms_persist_hook_fn(enum pms_primitive primitive, uintptr_t addr, size_t bytes);
/* atomic: a test sets it while other threads persist */
extern pms_persist_hook_fn *_Atomic pms_persist_hook;
/* in the hook: the descriptor of a file operation, or of what is mapped */
extern _Thread_local int pms_persist_hook_fd;

/* The best write-back instruction of this CPU. Never PMS_FLUSH_NONE on x86-64 and aarch64. */
enum pms_flush pms_persist_best_flush(void);

/* ---- memory ---- */

/* Stores one aligned 8-byte word, whole or not at all. Not written back. */
void pms_persist_store8(struct pms_persist *p, uint64_t *dst, uint64_t value);

/* Stores n bytes. Not written back: the caller flushes the range before the fence that needs it. */
void pms_persist_store(struct pms_persist *p, void *dst, const void *src, size_t n);

/* Copies n bytes and starts their write-back (non-temporal stores for large n, else store +
 * flush): durable at the next fence. With PMS_FLUSH_NONE small copies are plain. dst 64-byte
 * aligned for speed, not for correctness. */
void pms_persist_copy(struct pms_persist *p, void *dst, const void *src, size_t n);

/* As pms_persist_copy, and returns crc continued over the bytes *as copied*: src is read once,
 * and may be stored to meanwhile. steady: PMS_CRC_BLOCK bytes of scratch. */
#define PMS_CRC_BLOCK 4096u /* copied and checksummed while it is in the first-level cache */
uint32_t pms_persist_copy_crc(struct pms_persist *p, void *dst, const void *src, size_t n,
                              uint32_t crc, void *steady);

/* As pms_persist_copy from a run of zeros. */
void pms_persist_zero(struct pms_persist *p, void *dst, size_t n);

/* Starts write-back of all lines that [addr, addr+n) touches. No-op with PMS_FLUSH_NONE. */
void pms_persist_flush(struct pms_persist *p, const void *addr, size_t n);

/* All stores written back before it are durable after it; it is also a compiler barrier.
 * Non-temporal stores are ordered by it in every domain. */
void pms_persist_fence(struct pms_persist *p);

/* Before the release of a lock: what this thread wrote back is durable after the *next* fence of
 * any thread that takes the lock. A fence orders one core's write-backs. On x86-64 the release
 * is a locked instruction, which orders them as a fence does (Intel SDM vol. 2, CLWB), and this
 * executes nothing; elsewhere it is a fence. To a hook it is a fence of this thread. */
void pms_persist_hand_over(struct pms_persist *p);

/* fdatasync. what: "syncing ...", where nothing more is written then. ERRORS: PMS_E_OS, whatever
 * errno it gave: what was written before may be lost, also if the disk is full. So what is durable
 * is unknown from then on, and failed_syncs says so for good. */
int pms_persist_sync(struct pms_persist *p, int fd, const char *what, struct pms_error *error);

/* A file that serves as memory (spill.h): waits for what is being written of it, and then starts
 * writing the rest (start) and waits for that, too (wait). false: some of it is lost. That leaves
 * unknown what is in memory: failed_syncs says so. Async-signal-safe. */
bool pms_persist_send(struct pms_persist *p, int fd, bool start, bool wait);

/* ---- files: 0 or errno; retried on EINTR and on short writes ---- */
int pms_persist_pwrite(struct pms_persist *p, int fd, const void *data, size_t n, uint64_t offset);
/* may change iov */
int pms_persist_pwritev(struct pms_persist *p, int fd, struct iovec *iov, int count,
                        uint64_t offset);
/* From another file into mappings of the medium, as far as it reaches: *done bytes. To a hook it
 * is a copy to where it begins. */
/* may change iov */
int pms_persist_preadv(struct pms_persist *p, int fd, struct iovec *iov, int count, uint64_t offset,
                       uint64_t *done);
/* What the file has there, whole or up to its end; -1 with errno. A part of a record is not taken
 * for a file that ends, because a signal came. No primitive: hooks do not see it. */
ssize_t pms_persist_read(int fd, void *to, size_t n, uint64_t offset);
/* posix_fallocate: where the file system cannot, the C library reads and writes a byte of each
 * block, in turn. Nobody may write meanwhile. */
int pms_persist_allocate(struct pms_persist *p, int fd, uint64_t offset, uint64_t bytes);
/* fallocate: as above, but writes nothing itself, so that others may meanwhile. */
int pms_persist_reserve(struct pms_persist *p, int fd, uint64_t offset, uint64_t bytes);
/* The same for a file in memory that is mapped writable: what it can is made of huge pages. */
int pms_persist_make(struct pms_persist *p, int fd, unsigned char *mapped, uint64_t offset,
                     uint64_t bytes);
#define PMS_CANNOT_RESERVE(err) ((err) == EOPNOTSUPP || (err) == ENOSYS || (err) == EINVAL)
int pms_persist_truncate(struct pms_persist *p, int fd, uint64_t bytes);
/* what the page cache has of it and need not have: advice alone */
void pms_persist_forget(int fd, uint64_t offset, uint64_t bytes);
int pms_persist_protect(struct pms_persist *p, void *addr, size_t n, int prot); /* mprotect */
/* mmap of the store's file at a reserved address. */
int pms_persist_map(struct pms_persist *p, void *addr, size_t n, int prot, int flags, int fd,
                    uint64_t offset);

/* ---- parallel copying ---- */

/* Runs fn(ctx, i) for i in [0, n), on the calling thread and on at most the machine's other
 * cores. Safe inside the fault handler: workers are started by pms_parallel_start, wait on a
 * futex, mask all signals but those of their own stores (which are captured as anyone's), take
 * no lock and no memory. Without workers (not started, or in a fork child), and while they are
 * at another caller's job, it runs everything in the caller. */
void pms_parallel_start(void);
void pms_parallel_for(void (*fn)(void *ctx, size_t i), void *ctx, size_t n);
/* The same of what waits for a disk: by four threads at least, however many cores there are, so
 * that some compute while others wait. As long as it takes, other jobs run in their callers. */
void pms_overlap_start(void);
void pms_overlap(void (*fn)(void *ctx, size_t i), void *ctx, size_t n);
void pms_parallel_after_fork_in_child(void);

#endif
