/* A small store file of two segments, and a workload whose every state is known: page p after
 * transaction t holds fill(p, tx that wrote it last), so a file is checked without keeping
 * copies. */
#ifndef PMS_JOURNAL_FIXTURE_H
#define PMS_JOURNAL_FIXTURE_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checksum.h"
#include "journal/journal.h"
#include "journal/ring.h"
#include "test.h"

/* A check without which going on makes no sense: ends the process, a child too. */
#define MUST(cond)                                                         \
    do {                                                                   \
        if (!(cond)) {                                                     \
            printf("%s:%d: MUST(%s) failed\n", __FILE__, __LINE__, #cond); \
            fflush(stdout);                                                \
            _exit(1);                                                      \
        }                                                                  \
    } while (0)

/* The thread that writes images home: journal/home.c says its name. Others write what commits do.
 */
static inline bool is_writer(void)
{
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return strcmp(name, "pms-journal") == 0;
}

#ifndef LOG0     /* else the test is of another size */
#define LOG0 14u /* pages */
#define LOG1 10u
#define DATA0 48u
#define DATA1 24u
#define EXTENT_PAGES 4u
#endif
#define FIRST (PMS_OFF_SEGMENTS / PMS_PAGE) /* page of the first segment */
#define DATA0_PAGE (FIRST + 1 + LOG0)
#define SEGMENT1 (DATA0_PAGE + DATA0)
#define DATA1_PAGE (SEGMENT1 + 1 + LOG1)
#define FILE_PAGES (DATA1_PAGE + DATA1)
#define FILE_BYTES ((uint64_t)FILE_PAGES * PMS_PAGE)
#define TX_MOST 48u
#define EXTENTS 6u /* at the end of segment 0's data: born and freed as a whole */
#define EXTENT0_PAGE (DATA0_PAGE + DATA0 - EXTENTS * EXTENT_PAGES)

static inline struct pms_superblock fixture_super(void)
{
    struct pms_superblock super;
    memset(&super, 0, sizeof super);
    super.file_bytes = FILE_BYTES;
    super.segment_count = 2;
    super.segment[0] = (struct pms_segment){.table_off = FIRST * PMS_PAGE,
                                            .log_off = (FIRST + 1) * PMS_PAGE,
                                            .log_bytes = LOG0 * PMS_PAGE,
                                            .data_off = DATA0_PAGE * PMS_PAGE,
                                            .data_pages = DATA0};
    super.segment[1] = (struct pms_segment){.table_off = SEGMENT1 * PMS_PAGE,
                                            .log_off = (SEGMENT1 + 1) * PMS_PAGE,
                                            .log_bytes = LOG1 * PMS_PAGE,
                                            .data_off = DATA1_PAGE * PMS_PAGE,
                                            .data_pages = DATA1};
    return super;
}

/* ---- the workload ---- */

struct step {
    struct pms_run runs[FILE_PAGES];
    uint32_t count;
    bool drain; /* after it */
};
static struct step steps[TX_MOST + 1];
/* transaction that wrote the page last, at each transaction */
static uint32_t writer[TX_MOST + 1][FILE_PAGES];
static bool dead[TX_MOST + 1][FILE_PAGES]; /* content does not matter */
static uint32_t tx_count;

static uint64_t seed_state = 88172645463325252ull;
static inline uint32_t draw(uint32_t n)
{
    seed_state ^= seed_state << 13;
    seed_state ^= seed_state >> 7;
    seed_state ^= seed_state << 17;
    return (uint32_t)(seed_state >> 20) % n;
}

static inline void fill(unsigned char *to, uint64_t page, uint64_t tx)
{
    if (tx == 0) {
        memset(to, 0, PMS_PAGE);
        return;
    }
    uint64_t x = (page << 32 | tx) * 0x9e3779b97f4a7c15ull + 1;
    for (unsigned i = 0; i < PMS_PAGE; i += 8) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        memcpy(to + i, &x, 8);
    }
}

static inline uint64_t some_page(void)
{
    switch (draw(8)) {
    case 0: return PMS_OFF_ROOT / PMS_PAGE;
    case 1: return FIRST;
    case 2: return SEGMENT1;
    case 3: return DATA1_PAGE + draw(DATA1);
    default: return DATA0_PAGE + draw(DATA0 - EXTENTS * EXTENT_PAGES);
    }
}

/* Plans transactions 1..n. Extents dead at the last transaction are born straight home; live
 * ones are changed through the journal, or freed, so that straight pages meet waiting images. */
static inline void plan_steps(uint32_t n, uint32_t seed, uint32_t pages_most, uint32_t drain_every)
{
    seed_state = 88172645463325252ull + seed * 7919ull;
    tx_count = n;
    memset(writer, 0, sizeof writer);
    memset(dead, 0, sizeof dead);
    for (uint64_t p = EXTENT0_PAGE; p < EXTENT0_PAGE + EXTENTS * EXTENT_PAGES; p++)
        dead[0][p] = true;
    for (uint32_t t = 1; t <= n; t++) {
        unsigned char how[FILE_PAGES] = {0}; /* 1 image, 2 straight */
        memcpy(writer[t], writer[t - 1], sizeof writer[t]);
        memcpy(dead[t], dead[t - 1], sizeof dead[t]);
        how[PMS_OFF_ROOT / PMS_PAGE] = 1;
        for (uint32_t i = draw(pages_most); i > 0; i--)
            how[some_page()] = 1;
        for (uint32_t e = 0; e < EXTENTS; e++) {
            uint64_t first = EXTENT0_PAGE + e * EXTENT_PAGES;
            uint32_t what = draw(3);
            bool born = dead[t - 1][first];
            for (uint64_t p = first; p < first + EXTENT_PAGES; p++) {
                if (born && what == 0) {
                    how[p] = 2;
                    dead[t][p] = false;
                } else if (!born && what == 0) {
                    dead[t][p] = true;
                } else if (!born && what == 1 && p == first + 1) {
                    how[p] = 1;
                }
            }
            /* born and freed in the same transaction, and yet reported */
            if (born && what == 1 && draw(4) == 0) {
                for (uint64_t p = first; p < first + EXTENT_PAGES; p++)
                    how[p] = 2;
            }
        }
        struct step *s = &steps[t];
        s->count = 0;
        s->drain = drain_every && t % drain_every == 0;
        for (uint64_t p = 0; p < FILE_PAGES; p++) {
            if (!how[p])
                continue;
            writer[t][p] = t;
            struct pms_run *last = s->count ? &s->runs[s->count - 1] : NULL;
            if (last && last->page + last->pages == p && last->home == (how[p] == 2))
                last->pages++;
            else
                s->runs[s->count++] = (struct pms_run){.page = p, .pages = 1, .home = how[p] == 2};
        }
    }
}

/* ---- files ---- */

static inline int new_file(void)
{
    int fd = memfd_create("journal", MFD_CLOEXEC);
    MUST(fd >= 0);
    MUST(ftruncate(fd, (off_t)FILE_BYTES) == 0);
    return fd;
}

static inline void load_file(int fd, unsigned char *to)
{
    MUST(pread(fd, to, FILE_BYTES, 0) == (ssize_t)FILE_BYTES);
}
static inline void store_file(int fd, const unsigned char *from)
{
    MUST(pwrite(fd, from, FILE_BYTES, 0) == (ssize_t)FILE_BYTES);
}

/* Formats; with window > 0 (bytes) the ring is made so small. */
static inline void format(int fd, uint64_t window)
{
    struct pms_superblock super = fixture_super();
    struct pms_persist p = {0};
    struct pms_error error;
    MUST(pms_journal_format(fd, &p, &super, 0, &error) == PMS_OK);
    if (window) {
        struct pms_ring ring;
        struct pms_janchor anchor;
        bool twins;
        pms_ring_init(&ring, fd, &super, 0);
        MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK && twins);
        anchor.window = window;
        MUST(pms_anchor_advance(fd, &p, &anchor, &error) == PMS_OK);
    }
}

static inline int recover_status(int fd, unsigned char *into, struct pms_journal_recovery *result)
{
    struct pms_superblock super = fixture_super();
    struct pms_persist p = {0};
    struct pms_error error;
    struct pms_journal_asked asked = {.into = into};
    return pms_journal_recover(fd, &p, &super, &asked, result, &error);
}

static inline uint64_t recover_tx(int fd, unsigned char *into)
{
    struct pms_journal_recovery result;
    MUST(recover_status(fd, into, &result) == PMS_OK);
    return result.tx;
}

static inline bool is_logged(uint64_t page) /* pages that transactions change */
{
    return page == PMS_OFF_ROOT / PMS_PAGE || page == FIRST || page == SEGMENT1 ||
           page >= DATA1_PAGE || (page >= DATA0_PAGE && page < SEGMENT1);
}

/* The pages of an image of the file are those of transaction tx. */
static inline bool same_state(const unsigned char *image, uint64_t tx)
{
    unsigned char want[PMS_PAGE];
    for (uint64_t p = 0; p < FILE_PAGES; p++) {
        if (!is_logged(p) || dead[tx][p])
            continue;
        fill(want, p, writer[tx][p]);
        if (memcmp(image + p * PMS_PAGE, want, PMS_PAGE) != 0) {
            printf("page %u: not that of transaction %u\n", (unsigned)p, (unsigned)tx);
            return false;
        }
    }
    return true;
}

/* ---- an open journal ---- */

struct store {
    struct pms_superblock super;
    struct pms_persist persist;
    struct pms_map map;
    struct pms_journal *journal;
    uint64_t tx;
};

static inline void store_open(struct store *s, int fd, uint64_t tx)
{
    struct pms_error error;
    memset(s, 0, sizeof *s);
    s->super = fixture_super();
    s->tx = tx;
    MUST(pms_map_open(&s->map, fd, FILE_BYTES, FILE_BYTES, PMS_MAP_PRIVATE, &s->persist, &error) ==
         PMS_OK);
    MUST(pms_journal_open(&s->journal, &s->map, &s->super, tx, &error) == PMS_OK);
}

static inline void store_write(struct store *s, const struct pms_run *runs, uint32_t count,
                               uint64_t salt)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t off = runs[i].page * PMS_PAGE, bytes = (uint64_t)runs[i].pages * PMS_PAGE;
        MUST(pms_map_unprotect(&s->map, off, bytes) == 0);
        for (uint64_t p = runs[i].page; p < runs[i].page + runs[i].pages; p++)
            fill(s->map.user + p * PMS_PAGE, p, salt);
        if (salt % 3) /* every third transaction leaves its pages writable, as hot ones are */
            MUST(pms_map_protect(&s->map, off, bytes) == 0);
    }
}

/* The next transaction of the plan. */
static inline int store_step(struct store *s, struct pms_error *error)
{
    struct step *step = &steps[s->tx + 1];
    struct pms_run runs[FILE_PAGES];
    memcpy(runs, step->runs, step->count * sizeof runs[0]);
    store_write(s, runs, step->count, s->tx + 1);
    int status = pms_journal_commit(
        s->journal, &(struct pms_change){.tx = s->tx + 1, .runs = runs, .run_count = step->count},
        error);
    if (status == PMS_OK)
        s->tx++;
    return status;
}

static inline void store_close(struct store *s)
{
    struct pms_error error;
    MUST(pms_journal_close(s->journal, false, &error) == PMS_OK);
    pms_map_close(&s->map);
}

#endif
