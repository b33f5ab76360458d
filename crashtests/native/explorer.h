/* The walk along one trace: what the parts of it share. A unit is a line (model ii) or a sector
 * (model iii).
 *
 *   images.c   the walk: event by event, to the part that knows the model
 *   lines.c    (ii)  what is durable of a line, and what may be
 *   sectors.c  (iii) the same of a sector
 *   prefix.c   (i)   byte by byte
 *   damage.c   (iv)  on top of what is there
 *   window.c   which combinations of units are made
 *   image.c    the image under construction, and the oracle's verdict of it
 *   campaign.c chance, and progress
 *   seen.c     images made before
 *
 * Each calls only those below it. What window.c has to ask of a model, and image.c of the walk,
 * they ask through the explorer: `units` and `explore`. */
#ifndef CRASH_EXPLORER_H
#define CRASH_EXPLORER_H

#include "images.h"

#define LINE 64u
#define SECTOR 512u

struct pend {       /* one store to a unit, not durable yet */
    uint64_t value; /* of a sector: which version */
    /* a bit for each thread that has started a write-back of it: durable after that thread's
     * fence */
    uint64_t flushers;
    uint8_t word, kind, thread; /* kind: 0 stored, 1 non-temporal, 2 written to the file */
};

struct unit { /* a line or a sector with something that is not durable yet */
    struct pend *pend;
    uint32_t count, room;
    bool listed;
};

struct undo {
    uint64_t off, value;
};

struct explorer;

/* What may have become of a unit that is not durable yet: an option is one of the possibilities. */
struct unit_model {
    /* how many; 0: nothing arrived */
    uint64_t (*options)(const struct explorer *x, const struct unit *u);
    /* the one where all of it did */
    uint64_t (*everything)(const struct explorer *x, const struct unit *u);
    void (*apply)(struct explorer *x, uint64_t number, uint64_t option);
};

struct explorer {
    struct campaign *c;
    const struct trace *t;
    unsigned char *img;        /* what is durable; while an image is tried: that image */
    bool *used;                /* pages of it that may be other than zeros */
    unsigned char *now;        /* all stores so far */
    uint64_t bytes, now_bytes; /* size of the file: durable, now */
    uint64_t hash[2];
    struct unit *unit;
    uint64_t *active; /* unit numbers */
    uint64_t active_count;
    unsigned char **version; /* sectors: contents, indexed by pend.value */
    uint64_t versions, versions_room;
    struct undo *undo;
    uint64_t undo_count, undo_room;
    uint32_t unit_bytes;
    const struct unit_model *units;
    void (*explore)(struct campaign *c, const struct trace *t, const unsigned char *base,
                    const bool *used, const struct board *board, const struct promise *fixed,
                    int depth); /* a recovery is crashed by the same walk */
    const struct board *board;
    const struct promise *fixed;
    uint32_t acked, begun;
    int depth;
    int scratch_fd;
    char scratch_path[256];
    uint64_t event; /* where the walk is */
    uint64_t windows_left, budget_end;
    uint64_t *option; /* of each active unit, while an image is tried */
};

static inline uint64_t *word_at(unsigned char *p, uint64_t off)
{
    return (uint64_t *)(void *)(p + off);
}
static inline bool is_store(const struct tr_event *e)
{
    return e->kind <= TR_USER || e->kind == TR_PWRITE;
}
static inline bool over(const struct explorer *x)
{
    return x->c->tally.failures >= x->c->stop_after;
}

/* Domain process on a disk, and the machine goes down: the kernel may have written any page of
 * the shared mapping, as it was at any time, or none. Whole ones: what the store promises of
 * them is that they are synced before the clean mark, and not opened without it. */
static inline bool is_mapping_on_disk(const struct explorer *x)
{
    return x->c->model == MODEL_SECTORS && x->c->domain != PMS_DOMAIN_FILE;
}

/* ---- image.c ---- */
uint64_t image_mix(uint64_t off, uint64_t value, uint64_t salt);
/* for good. All changes of the image: its hash is always known */
void image_put(struct explorer *x, uint64_t off, uint64_t value);
void image_put_bytes(struct explorer *x, uint64_t off, const unsigned char *from, uint64_t bytes);
void image_try_word(struct explorer *x, uint64_t off, uint64_t value); /* until image_take_back */
void image_take_back(struct explorer *x);
/* as it is, to the oracle, unless it was there before */
void image_ask(struct explorer *x, uint64_t bytes, const char *how);

/* ---- window.c ---- */
/* active, with room for one more pend */
struct unit *unit_touch(struct explorer *x, uint64_t number);
/* those with nothing left are no longer active */
void units_compact(struct explorer *x);
/* here: as many combinations of the active units as its share of the budget */
void window_crash(struct explorer *x);

/* ---- the models ---- */
void lines_begin(struct explorer *x);
void lines_walk(struct explorer *x, const struct tr_event *e);
void sectors_begin(struct explorer *x);
void sectors_walk(struct explorer *x, const struct tr_event *e);
void sectors_end(struct explorer *x);
/* every: bytes between images, on average */
void prefix_walk(struct explorer *x, const struct tr_event *e, uint64_t every);
void damage_here(struct explorer *x, uint64_t count);

#endif
