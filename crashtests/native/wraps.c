/* What the linker puts before functions of the C library and of the engine (--wrap, in the
 * Makefile). */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>

#include "oracle.h"
#include "threads.h"

/* ---- nothing random in a store: the same seed makes the same images ---- */

pid_t __wrap_getpid(void);
ssize_t __wrap_getrandom(void *buffer, size_t n, unsigned flags);
int __real_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_statx(int dir, const char *path, int flags, unsigned mask, struct statx *x);

pid_t __wrap_getpid(void) { return 4711; }

ssize_t __wrap_getrandom(void *buffer, size_t n, unsigned flags)
{
    (void)flags;
    memset(buffer, 0x5a, n);
    return (ssize_t)n;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *t)
{
    if (clock != CLOCK_REALTIME)
        return __real_clock_gettime(clock, t);
    *t = (struct timespec){1700000000, 0};
    return 0;
}

/* Neither number nor time of creation of the file: an image lies in another one. */
int __wrap_statx(int dir, const char *path, int flags, unsigned mask, struct statx *x)
{
    (void)dir, (void)path, (void)flags, (void)mask, (void)x;
    errno = ENOSYS;
    return -1;
}

/* ---- another run of the machine ---- */

void __real_pms_boot_id(uint8_t id[16]);
void __wrap_pms_boot_id(uint8_t id[16]);

bool machine_restarted;

void __wrap_pms_boot_id(uint8_t id[16])
{
    __real_pms_boot_id(id);
    id[0] ^= machine_restarted;
}

/* ---- no chance in how threads meet ---- */

void __real_pms_lock_release(struct pms_lock *lock);
void __wrap_pms_lock_release(struct pms_lock *lock);

void __wrap_pms_lock_release(struct pms_lock *lock)
{
    void (*released)(const struct pms_lock *lock) = threads_released;
    __real_pms_lock_release(lock);
    if (released)
        released(lock);
}
