/* How full a heap gets under churn, and what allocations and an open take. */
#include "heap_store.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- fragmentation ---- */

struct churn_block {
    uint64_t off, bytes;
};

static double churn(unsigned ops, unsigned low, unsigned high, uint64_t heap_bytes,
                    double occupancy)
{
    static struct churn_block block[400000];
    struct store s;
    uint64_t pages = heap_bytes / PMS_PAGE, live = 0, n = 0, refused = 0, asked = 0;
    store_open(&s, pages, full_log(pages), 0);
    double worst = 1, sum = 0;
    unsigned samples = 0;
    for (unsigned op = 0; op < ops; op++) {
        uint64_t bytes = log_uniform(low, high);
        while ((double)(live + bytes) > occupancy * (double)heap_bytes && n) {
            uint64_t i = rnd(n);
            release(&s, block[i].off);
            live -= block[i].bytes;
            block[i] = block[--n];
        }
        commit(&s);
        asked++;
        uint64_t off;
        if (n < 400000 && pms_heap_alloc(s.heap, bytes, PMS_OWNER_USER, &off, &s.error) == PMS_OK) {
            block[n++] = (struct churn_block){off, bytes};
            live += bytes;
        } else {
            refused++;
        }
        if (op > ops / 2 && op % 100 == 0) {
            struct pms_heap_stats st = stats(&s);
            double lost = 1 - (double)(live + st.free_bytes) / (double)heap_bytes;
            sum += lost;
            samples++;
            worst = lost < worst ? lost : worst;
        }
    }
    struct pms_heap_stats st = stats(&s);
    printf(
        "  churn 2^%u..2^%u at %.0f %%: %.2f %% of requests refused, occupied %.1f %%, lost to rounding %.2f %%, "
        "largest free %.1f MiB of %.1f MiB free\n",
        low, high, occupancy * 100, 100 * (double)refused / (double)asked,
        100 * (double)live / (double)heap_bytes, 100 * sum / samples,
        (double)st.largest_free / 1048576, (double)st.free_bytes / 1048576);
    double rate = (double)refused / (double)asked;
    store_close(&s);
    return rate;
}

/* ---- times ---- */

static void report_pairs(struct store *s, uint64_t bytes, unsigned n)
{
    double t = now();
    uint64_t fences = s->persist.fences;
    for (unsigned i = 0; i < n; i++) {
        uint64_t a = alloc(s, bytes);
        release(s, a);
    }
    t = now() - t;
    printf("  %8llu B alloc+free in one transaction: %.0f ns, %.2f fences\n",
           (unsigned long long)bytes, t * 1e9 / n, (double)(s->persist.fences - fences) / n);
    commit(s);
    uint64_t a = alloc(s, bytes);
    double in = 0, out = 0;
    fences = s->persist.fences;
    for (unsigned i = 0; i < n; i++) {
        commit(s);
        t = now();
        uint64_t b = alloc(s, bytes);
        in += now() - t;
        commit(s);
        t = now();
        release(s, a);
        out += now() - t;
        a = b;
    }
    printf(
        "  %8llu B alloc %.0f ns, free %.0f ns, each first in its transaction, %.2f fences for both\n",
        (unsigned long long)bytes, in * 1e9 / n, out * 1e9 / n,
        (double)(s->persist.fences - fences) / n);
}

static void report_open(const char *what, struct store *s)
{
    double best = 1;
    for (int i = 0; i < 5; i++) {
        struct pms_heap *h;
        double t = now();
        CHECK(pms_heap_open(&h, &s->undo, &s->super, &s->error) == PMS_OK);
        t = now() - t;
        best = t < best ? t : best;
        pms_heap_close(h);
    }
    printf("  open, %s: %.2f ms\n", what, best * 1e3);
}

static void report_times(void)
{
    struct store s;
    uint64_t pages = (4ull << 30) / PMS_PAGE;
    store_open(&s, pages, full_log(pages), 0);
    s.persist.flush = pms_persist_best_flush();
    alloc(&s, 64);
    report_pairs(&s, 64, 100000 / SLOWER);
    report_pairs(&s, 1000, 100000 / SLOWER);
    report_pairs(&s, 1 << 20, 20000 / SLOWER);
    report_pairs(&s, 64 << 20, 2000 / SLOWER);
    store_close(&s);
    store_open(&s, pages, full_log(pages), 0);
    for (unsigned i = 0; i < 10000; i++)
        alloc(&s, 40000 + rnd(300000));
    report_open("10,000 extents", &s);
    store_close(&s);
    store_open(&s, pages, full_log(pages), 0);
    for (unsigned i = 0; i < 1000000 / SLOWER; i++)
        alloc(&s, 64);
    report_open("1,000,000 slots", &s);
    store_close(&s);
}

static void test_fragmentation(void)
{
    CHECK(churn(30000 / SLOWER, 4, 26, 4ull << 30, 0.85) < 0.1);
    churn(30000 / SLOWER, 4, 26, 4ull << 30, 0.90);
    CHECK(churn(30000 / SLOWER, 4, 22, 1ull << 30, 0.90) < 0.1);
    CHECK(churn(300000 / SLOWER, 4, 15, 256ull << 20, 0.90) < 0.01);
}

int main(void)
{
    TEST(test_fragmentation);
    report_times();
    return test_summary();
}
