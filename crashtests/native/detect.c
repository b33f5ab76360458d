/* The detector of stores past the seam. The engine is compiled with -fsanitize=thread and linked
 * with these functions instead of the sanitizer's: every store that the compiler emits calls one
 * of them first. One into a view of the store has to lie in what the seam announced. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "trace.h"

#define CALLER __builtin_return_address(0)

void __tsan_init(void);
void __tsan_func_entry(void *pc);
void __tsan_func_exit(void);
void __tsan_init(void) {}
void __tsan_func_entry(void *pc) { (void)pc; }
void __tsan_func_exit(void) {}

/* A table. */
/* clang-format off */
#define READ(name) \
    void __tsan_##name(void *p); \
    void __tsan_##name(void *p) { (void)p; }
READ(read1) READ(read2) READ(read4) READ(read8) READ(read16)
READ(unaligned_read2) READ(unaligned_read4) READ(unaligned_read8) READ(unaligned_read16)

#define WRITE(name, bytes) \
    void __tsan_##name(void *p); \
    void __tsan_##name(void *p) { trace_store(p, bytes, CALLER); }
WRITE(write1, 1) WRITE(write2, 2) WRITE(write4, 4) WRITE(write8, 8) WRITE(write16, 16)
WRITE(unaligned_write2, 2) WRITE(unaligned_write4, 4) WRITE(unaligned_write8, 8) WRITE(unaligned_write16, 16)
    /* clang-format on */

    void __tsan_read_range(void *p, uint64_t n);
void __tsan_read_range(void *p, uint64_t n) { (void)p, (void)n; }
void __tsan_write_range(void *p, uint64_t n);
void __tsan_write_range(void *p, uint64_t n) { trace_store(p, n, CALLER); }

void *detect_memcpy(void *dst, const void *src, size_t n);
void *detect_memmove(void *dst, const void *src, size_t n);
void *detect_memset(void *dst, int c, size_t n);
void *detect_memcpy(void *dst, const void *src, size_t n)
{
    trace_store(dst, n, CALLER);
    return memcpy(dst, src, n);
}
void *detect_memmove(void *dst, const void *src, size_t n)
{
    trace_store(dst, n, CALLER);
    return memmove(dst, src, n);
}
void *detect_memset(void *dst, int c, size_t n)
{
    trace_store(dst, n, CALLER);
    return memset(dst, c, n);
}

/* Atomics become calls: they do what they say, in the strongest order. */
/* A table. */
/* clang-format off */
#define ATOMIC(bits, type, bytes) \
    type __tsan_atomic##bits##_load(const volatile type *p, int order); \
    type __tsan_atomic##bits##_load(const volatile type *p, int order) { (void)order; return __atomic_load_n(p, __ATOMIC_SEQ_CST); } \
    void __tsan_atomic##bits##_store(volatile type *p, type v, int order); \
    void __tsan_atomic##bits##_store(volatile type *p, type v, int order) \
    { \
        (void)order; \
        trace_store((const void *)(uintptr_t)p, bytes, CALLER); \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST); \
    } \
    type __tsan_atomic##bits##_exchange(volatile type *p, type v, int order); \
    type __tsan_atomic##bits##_exchange(volatile type *p, type v, int order) \
    { \
        (void)order; \
        trace_store((const void *)(uintptr_t)p, bytes, CALLER); \
        return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); \
    } \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *e, type v, int good, int bad); \
    int __tsan_atomic##bits##_compare_exchange_strong(volatile type *p, type *e, type v, int good, int bad) \
    { \
        (void)good, (void)bad; \
        trace_store((const void *)(uintptr_t)p, bytes, CALLER); \
        return __atomic_compare_exchange_n(p, e, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
    } \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type *p, type *e, type v, int good, int bad); \
    int __tsan_atomic##bits##_compare_exchange_weak(volatile type *p, type *e, type v, int good, int bad) \
    { \
        return __tsan_atomic##bits##_compare_exchange_strong(p, e, v, good, bad); \
    }
#define ATOMIC_OP(bits, type, bytes, op) \
    type __tsan_atomic##bits##_fetch_##op(volatile type *p, type v, int order); \
    type __tsan_atomic##bits##_fetch_##op(volatile type *p, type v, int order) \
    { \
        (void)order; \
        trace_store((const void *)(uintptr_t)p, bytes, CALLER); \
        return __atomic_fetch_##op(p, v, __ATOMIC_SEQ_CST); \
    }
#define ATOMICS(bits, type, bytes) \
    ATOMIC(bits, type, bytes) ATOMIC_OP(bits, type, bytes, add) ATOMIC_OP(bits, type, bytes, sub) \
        ATOMIC_OP(bits, type, bytes, and) ATOMIC_OP(bits, type, bytes, or) ATOMIC_OP(bits, type, bytes, xor)
ATOMICS(8, uint8_t, 1)
ATOMICS(16, uint16_t, 2)
ATOMICS(32, uint32_t, 4)
ATOMICS(64, uint64_t, 8)
/* clang-format on */

void __tsan_atomic_thread_fence(int order);
void __tsan_atomic_signal_fence(int order);
void __tsan_atomic_thread_fence(int order)
{
    (void)order;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int order)
{
    (void)order;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* quiet.h: about reads, which are of no account here. */
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreReadsBegin(const char *file, int line) { (void)file, (void)line; }
void AnnotateIgnoreReadsEnd(const char *file, int line) { (void)file, (void)line; }
