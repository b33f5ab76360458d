/* The native tests' whole framework: CHECK a condition, run a TEST, end with test_summary(). */
#ifndef PMS_TEST_H
#define PMS_TEST_H

#include <stdbool.h>
#include <stdio.h>

static int test_passed, test_failed, test_checks_failed;

#define CHECK(cond)                                                         \
    do {                                                                    \
        if (!(cond)) {                                                      \
            test_checks_failed++;                                           \
            printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #cond); \
        }                                                                   \
    } while (0)

#define TEST(function)                                      \
    do {                                                    \
        int before = test_checks_failed;                    \
        function();                                         \
        bool ok = test_checks_failed == before;             \
        test_passed += ok;                                  \
        test_failed += !ok;                                 \
        printf("%s %s\n", ok ? "ok  " : "FAIL", #function); \
        fflush(stdout);                                     \
    } while (0)

static inline int test_summary(void)
{
    printf("%d passed, %d failed\n", test_passed, test_failed);
    return test_failed != 0;
}

#endif
