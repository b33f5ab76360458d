/* Counts what libpmemobj asks of libpmem: fences, and lines flushed. Preloaded (LD_PRELOAD) in a
 * run of its own: no times. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#define NOT_DRAINED 1u  /* PMEM_F_MEM_NODRAIN */
#define NOT_FLUSHED 32u /* PMEM_F_MEM_NOFLUSH */

static uint64_t all_fences, all_lines;
static _Thread_local int depth; /* libpmem's functions call each other: the outermost counts */

void pmem_counts(uint64_t *fences, uint64_t *lines);
void pmem_counts(uint64_t *fences, uint64_t *lines)
{
    *fences = all_fences;
    *lines = all_lines;
}

static void count(const void *p, size_t n, int fences)
{
    if (depth)
        return;
    uintptr_t from = (uintptr_t)p / 64, to = ((uintptr_t)p + n + 63) / 64;
    all_lines += n ? to - from : 0;
    all_fences += (uint64_t)fences;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void pmem_drain(void);
void pmem_drain(void)
{
    count(NULL, 0, 1);
    REAL(pmem_drain)();
}

void pmem_flush(const void *p, size_t n);
void pmem_flush(const void *p, size_t n)
{
    count(p, n, 0);
    depth++;
    REAL(pmem_flush)(p, n);
    depth--;
}

void pmem_persist(const void *p, size_t n);
void pmem_persist(const void *p, size_t n)
{
    count(p, n, 1);
    depth++;
    REAL(pmem_persist)(p, n);
    depth--;
}

static void count_flags(const void *p, size_t n, unsigned flags)
{
    if (!(flags & NOT_FLUSHED))
        count(p, n, !(flags & NOT_DRAINED));
}

void *pmem_memcpy(void *d, const void *s, size_t n, unsigned flags);
void *pmem_memcpy(void *d, const void *s, size_t n, unsigned flags)
{
    count_flags(d, n, flags);
    depth++;
    void *result = REAL(pmem_memcpy)(d, s, n, flags);
    depth--;
    return result;
}

void *pmem_memmove(void *d, const void *s, size_t n, unsigned flags);
void *pmem_memmove(void *d, const void *s, size_t n, unsigned flags)
{
    count_flags(d, n, flags);
    depth++;
    void *result = REAL(pmem_memmove)(d, s, n, flags);
    depth--;
    return result;
}

void *pmem_memset(void *d, int c, size_t n, unsigned flags);
void *pmem_memset(void *d, int c, size_t n, unsigned flags)
{
    count_flags(d, n, flags);
    depth++;
    void *result = REAL(pmem_memset)(d, c, n, flags);
    depth--;
    return result;
}
