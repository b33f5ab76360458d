/* Reading pages that are protected, and hence quiet, while ThreadSanitizer watches: it takes a
 * store that is about to fault for one that happened, and knows nothing of the order that
 * mprotect gives, nor of reads that are thrown away when a look afterwards says so. */
#ifndef PMS_BASE_QUIET_H
#define PMS_BASE_QUIET_H

#include <stddef.h>
#include <string.h>

#if defined(__SANITIZE_THREAD__)
#define PMS_NO_TSAN __attribute__((no_sanitize("thread")))
/* Its memcpy is watched whatever the caller's attribute: copy by hand. */
PMS_NO_TSAN static inline void pms_quiet_copy(void *dst, const void *src, size_t n)
{
    volatile char *d = dst;
    for (size_t i = 0; i < n; i++)
        d[i] = ((const volatile char *)src)[i];
}
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#else
#define PMS_NO_TSAN
static inline void pms_quiet_copy(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }
#endif

/* Between the two, this thread (and the system calls it makes) may read what others store to: it
 * looks afterwards whether they did. */
static inline void pms_quiet_begin(void)
{
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
#endif
}

static inline void pms_quiet_end(void)
{
#if defined(__SANITIZE_THREAD__)
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
#endif
}

/* A full barrier. TSan knows none and would warn; on x86-64 and under TSan the lock operations
 * around it suffice. */
static inline void pms_full_fence(void)
{
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

/* Stores before it, before stores after it: to whoever reads the file. On x86-64 it keeps the
 * compiler in order. */
static inline void pms_store_fence(void)
{
#if !defined(__SANITIZE_THREAD__)
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

#endif
