/* The allocator against a model of who owns each line, and beside a thread that looks blocks up. */
#include "heap_store.h"

/* ---- a model of lines ---- */

enum { LINE_FREE = 0, LINE_LIVE = 1, LINE_DEAD = 2 };
#define MODEL_PAGES 24000u
#define MODEL_BLOCKS 20000u
#define MODEL_PINS 40u

struct model_block {
    uint64_t off, room;
    bool born;
};
struct model {
    struct store s;
    uint64_t n, n_committed, n_dead, pins;
    struct model_block block[MODEL_BLOCKS], committed[MODEL_BLOCKS], dead[MODEL_BLOCKS],
        pin[MODEL_PINS];
    unsigned char *line;
    uint64_t lines;
};

static void mark(struct model *m, uint64_t off, uint64_t bytes, int expect, int value)
{
    unsigned char *l = m->line + off / PMS_LINE;
    CHECK((off + bytes) / PMS_LINE <= m->lines);
    for (uint64_t i = 0; i < bytes / PMS_LINE; i++) {
        CHECK(expect < 0 || l[i] == expect);
        l[i] = (unsigned char)value;
    }
}

static bool pinned(const struct model *m, uint64_t off)
{
    for (uint64_t i = 0; i < m->pins; i++)
        if (m->pin[i].off == off)
            return true;
    return false;
}

static void model_alloc(struct model *m)
{
    uint64_t bytes = log_uniform(4, rnd(4) ? 15 : 23), off;
    enum pms_owner owner = rnd(4) ? PMS_OWNER_USER : PMS_OWNER_ENGINE;
    int status = m->n == MODEL_BLOCKS ? PMS_E_FULL
                                      : pms_heap_alloc(m->s.heap, bytes, owner, &off, &m->s.error);
    if (status == PMS_E_FULL)
        return;
    struct pms_block b;
    CHECK(status == PMS_OK && pms_heap_find(m->s.heap, off + rnd(bytes), &b));
    CHECK(b.off == off && b.bytes >= bytes && b.live && pms_heap_is_fresh(m->s.heap, off));
    CHECK((b.kind >= PMS_KIND_META_LARGE) == (owner == PMS_OWNER_ENGINE));
    mark(m, off, b.bytes, LINE_FREE, LINE_LIVE);
    m->block[m->n++] = (struct model_block){off, b.bytes, true};
}

static void model_free(struct model *m)
{
    if (!m->n)
        return;
    uint64_t i = rnd(m->n);
    struct model_block b = m->block[i];
    release(&m->s, b.off);
    CHECK(pms_heap_free(m->s.heap, b.off, NULL) == PMS_E_INVALID);
    m->block[i] = m->block[--m->n];
    bool gone = b.born && !pinned(m, b.off);
    mark(m, b.off, b.room, LINE_LIVE, gone ? LINE_FREE : LINE_DEAD);
    if (!gone) {
        CHECK(m->n_dead < MODEL_BLOCKS);
        m->dead[m->n_dead++] = b;
    }
}

static void model_pin(struct model *m)
{
    if (!m->n || m->pins == MODEL_PINS)
        return;
    struct model_block b = m->block[rnd(m->n)];
    if (pinned(m, b.off))
        return;
    pin(&m->s, b.off);
    m->pin[m->pins++] = b;
}

static void model_unpin(struct model *m)
{
    if (!m->pins)
        return;
    uint64_t i = rnd(m->pins);
    struct model_block b = m->pin[i];
    pms_heap_unpin(m->s.heap, b.off);
    m->pin[i] = m->pin[--m->pins];
    for (uint64_t d = 0; d < m->n_dead; d++)
        /* born here, or dead since before this transaction */
        if (m->dead[d].off == b.off && m->dead[d].born) {
            mark(m, b.off, b.room, LINE_DEAD, LINE_FREE);
            m->dead[d] = m->dead[--m->n_dead];
            break;
        }
}

static void model_commit(struct model *m)
{
    commit(&m->s);
    uint64_t kept = 0;
    for (uint64_t d = 0; d < m->n_dead; d++) {
        if (pinned(m, m->dead[d].off)) {
            m->dead[kept] = m->dead[d];
            m->dead[kept++].born = true;
        } else {
            mark(m, m->dead[d].off, m->dead[d].room, LINE_DEAD, LINE_FREE);
        }
    }
    m->n_dead = kept;
    for (uint64_t i = 0; i < m->n; i++)
        m->block[i].born = false;
    memcpy(m->committed, m->block, m->n * sizeof *m->block);
    m->n_committed = m->n;
}

static void model_rollback(struct model *m)
{
    rollback(&m->s);
    memset(m->line, LINE_FREE, m->lines);
    memcpy(m->block, m->committed, m->n_committed * sizeof *m->block);
    m->n = m->n_committed;
    for (uint64_t i = 0; i < m->n; i++)
        mark(m, m->block[i].off, m->block[i].room, LINE_FREE, LINE_LIVE);
    m->n_dead = 0;
    for (uint64_t i = 0; i < m->pins; i++)
        if (m->line[m->pin[i].off / PMS_LINE] == LINE_FREE) {
            mark(m, m->pin[i].off, m->pin[i].room, LINE_FREE, LINE_DEAD);
            m->dead[m->n_dead] = m->pin[i];
            m->dead[m->n_dead++].born = true;
        }
}

static int model_block(void *ctx, const struct pms_block *b)
{
    struct model *m = ctx;
    mark(m, b->off, b->bytes, LINE_LIVE, LINE_LIVE);
    return 0;
}

static void model_check(struct model *m)
{
    CHECK(pms_heap_walk(m->s.heap, model_block, m, &m->s.error) == PMS_OK && walked(&m->s) == m->n);
    struct pms_heap_stats st = stats(&m->s);
    CHECK(st.blocks == m->n && st.used_bytes + st.free_bytes + st.pinned_bytes <= st.data_bytes);
    CHECK(st.log_need <= pms_undo_capacity(&m->s.undo));
    for (unsigned i = 0; i < 100; i++) { /* find agrees with the model on any byte */
        uint64_t off = rnd(m->s.super.file_bytes);
        struct pms_block b;
        bool live = pms_heap_find(m->s.heap, off, &b) && b.live;
        CHECK(live == (m->line[off / PMS_LINE] == LINE_LIVE));
    }
}

static void test_model(unsigned ops)
{
    static struct model m;
    memset(&m, 0, sizeof m);
    store_open(&m.s, MODEL_PAGES, full_log(MODEL_PAGES), MODEL_PAGES / 3);
    m.lines = m.s.super.file_bytes / PMS_LINE;
    m.line = calloc(m.lines, 1);
    CHECK(m.line);
    for (unsigned op = 0; op < ops; op++) {
        uint64_t what = rnd(1000);
        bool grow = op / 5000 % 2 == 0;
        if (what < (grow ? 500u : 430u))
            model_alloc(&m);
        else if (what < 940)
            model_free(&m);
        else if (what < 960)
            model_pin(&m);
        else if (what < 980)
            model_unpin(&m);
        else if (what < 994)
            model_commit(&m);
        else
            model_rollback(&m);
        if (op % 500 == 0)
            model_check(&m);
    }
    while (m.pins)
        model_unpin(&m);
    model_commit(&m);
    model_check(&m);
    check_index(&m.s);
    while (m.n)
        model_free(&m);
    model_commit(&m);
    model_check(&m);
    free(m.line);
    store_close(&m.s);
}

/* ---- find, while another thread allocates ---- */

struct finder {
    struct store *s;
    const uint64_t *off;
    _Atomic bool stop;
    _Atomic uint64_t found;
};

static void *find_always(void *arg)
{
    struct finder *f = arg;
    uint64_t x = 1;
    while (!atomic_load(&f->stop)) {
        struct pms_block b;
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t off = f->off[x >> 58];
        CHECK(pms_heap_find(f->s->heap, off + (x >> 40) % 1000, &b) && b.off == off && b.live);
        pms_heap_find(f->s->heap, (x >> 33) % f->s->super.file_bytes, &b); /* anywhere: no crash */
        f->found++;
    }
    return NULL;
}

static void test_find_races(void)
{
    struct store s;
    uint64_t off[64];
    store_open(&s, 20000, full_log(20000), 0);
    for (int i = 0; i < 64; i++)
        off[i] = alloc(&s, i % 2 ? 1000 : 50000 + 10000 * (unsigned)i);
    commit(&s);
    struct finder f = {.s = &s, .off = off};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, find_always, &f) == 0);
    while (!atomic_load(&f.found))
        sched_yield(); /* the thread runs */
    for (unsigned i = 0; i < 20000; i++) {
        uint64_t a = alloc(&s, log_uniform(4, 18));
        if (rnd(4))
            release(&s, a);
        if (i % 200 == 199)
            rollback(&s);
    }
    atomic_store(&f.stop, true);
    pthread_join(thread, NULL);
    store_close(&s);
}

static void test_random_operations(void) { test_model(100000 / SLOWER); }

int main(void)
{
    TEST(test_find_races);
    TEST(test_random_operations);
    return test_summary();
}
