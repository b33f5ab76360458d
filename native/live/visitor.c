#include "live/visitor.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/pages.h"
#include "log/snapshot.h"

#define VISITORS_MAX 256u
/* what is kept for a reader that did not ask for more: a poll a second costs a commit of anything
 * not more than a few per cent of that second */
#define BOUND_SHARE 4u
#define BOUND_MIN (4ull << 20)
#define BOUND_MAX (64ull << 20)
/* a reader that says nothing for so long needs no snapshot: it may ask for the same again */
#define IDLE_MS 10000
#define IDLE_KEPT_MS 60000
#define LOOK_MS 1000 /* so often one that is silent is looked for */

struct pms_visitor {
    struct pms_visitor *next;
    uint8_t key[PMS_WIRE_KEY];
    struct pms_sender from;
    struct pms_snapshot *snapshot; /* or NULL: none was asked for, or it was idle */
    uint64_t tag;                  /* of the one that was asked for; 0: none */
    bool keep;
    int64_t heard_ms, looked_ms;
    /* the last pages that were sent to it, until it says that they have come */
    uint64_t sent_serial;
    uint32_t sent_count;
    struct pms_part sent[PMS_WIRE_RANGES];
};

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- who they are ---- */

static void unpin(struct pms_visitor *r)
{
    if (r->snapshot)
        pms_snapshot_close(r->snapshot);
    r->snapshot = NULL;
}

static void part_with(struct pms_visitors *v, struct pms_visitor **at)
{
    struct pms_visitor *r = *at;
    *at = r->next;
    v->count--;
    unpin(r);
    free(r);
}

static struct pms_visitor **find(struct pms_visitors *v, const uint8_t key[PMS_WIRE_KEY])
{
    struct pms_visitor **at = &v->first;
    while (*at && memcmp((*at)->key, key, PMS_WIRE_KEY) != 0)
        at = &(*at)->next;
    return at;
}

/* It may come again. */
static struct pms_visitor **longest_silent(struct pms_visitors *v)
{
    struct pms_visitor **found = &v->first;
    for (struct pms_visitor **at = found; *at; at = &(*at)->next)
        if ((*at)->heard_ms < (*found)->heard_ms)
            found = at;
    return found;
}

/* NULL: no memory; it tries again. */
static struct pms_visitor *welcome(struct pms_visitors *v, const uint8_t key[PMS_WIRE_KEY])
{
    struct pms_visitor **at = find(v, key);
    if (*at)
        return *at;
    if (v->count == VISITORS_MAX)
        part_with(v, longest_silent(v));
    struct pms_visitor *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    memcpy(r->key, key, PMS_WIRE_KEY);
    r->next = v->first;
    v->first = r;
    v->count++;
    return r;
}

/* ---- pinning ---- */

static uint64_t bound(const struct pms_superblock *super, bool keep)
{
    uint64_t state = 0;
    for (uint32_t i = 0; i < super->segment_count; i++)
        state += super->segment[i].data_pages * PMS_PAGE;
    uint64_t share = state / BOUND_SHARE;
    share = share < BOUND_MIN ? BOUND_MIN : share > BOUND_MAX ? BOUND_MAX : share;
    return keep ? state : share;
}

/* A snapshot of the last commit, with the superblock that knows all of it. */
static int pin(struct pms_visitor *r, const struct pms_served *s, struct pms_superblock *super)
{
    struct pms_undo *u = s->undo;
    for (;;) {
        pms_undo_lock(u);
        *super = *s->super;
        pms_undo_unlock(u);
        int status = pms_snapshot_open(u, super, bound(super, r->keep), 0, &r->snapshot, NULL);
        if (status != PMS_OK)
            return status;
        pms_undo_lock(u);
        bool grown = s->super->generation != super->generation;
        pms_undo_unlock(u);
        if (!grown)
            return PMS_OK;
        unpin(r);
    }
}

/* The one that was given back as idle, if nothing was committed since. */
static int pin_again(struct pms_visitor *r, const struct pms_served *s)
{
    struct pms_superblock super;
    int status = r->tag ? pin(r, s, &super) : PMS_E_STATE;
    if (status == PMS_OK && pms_snapshot_tag(r->snapshot) != r->tag) {
        unpin(r);
        r->tag = 0;
        status = PMS_E_STATE;
    }
    return status;
}

/* ---- answering ---- */

static int answer_pin(struct pms_visitor *r, const struct pms_served *s, bool keep,
                      unsigned char *to)
{
    struct pms_superblock super;
    unpin(r);
    r->keep = keep;
    r->tag = 0;
    r->sent_count = 0;
    int status = pin(r, s, &super);
    if (status != PMS_OK)
        return status;
    r->tag = pms_snapshot_tag(r->snapshot);
    memcpy(to, &super, sizeof super);
    return PMS_OK;
}

/* What has come is not kept for it any longer. */
static void release_taken(struct pms_visitor *r, uint64_t taken)
{
    for (uint32_t i = 0; i < r->sent_count && r->snapshot && taken == r->sent_serial; i++)
        pms_snapshot_release(r->snapshot, r->sent[i].off, r->sent[i].bytes);
    r->sent_count = 0;
}

static int answer_read(struct pms_visitor *r, const struct pms_served *s,
                       const struct pms_question *q, unsigned char *to)
{
    int status = r->snapshot ? PMS_OK : pin_again(r, s);
    if (status == PMS_OK)
        release_taken(r, q->taken);
    for (uint32_t i = 0; i < q->count && status == PMS_OK; i++) {
        status = pms_snapshot_read(r->snapshot, q->range[i].off, q->range[i].bytes, to, NULL);
        to += q->range[i].bytes;
    }
    r->sent_serial = q->serial;
    r->sent_count = status == PMS_OK ? q->count : 0;
    memcpy(r->sent, q->range, r->sent_count * sizeof q->range[0]);
    return status;
}

/* Whole pages that the store may have, for one answer. Else false. */
static bool add_up(const struct pms_question *q, uint64_t pages, uint64_t *bytes)
{
    *bytes = 0;
    for (uint32_t i = 0; i < q->count; i++) {
        const struct pms_part *x = &q->range[i];
        if (x->off % PMS_PAGE || x->bytes % PMS_PAGE || !x->bytes || x->off / PMS_PAGE >= pages ||
            x->bytes / PMS_PAGE > pages - x->off / PMS_PAGE || x->bytes > PMS_WIRE_ANSWER - *bytes)
            return false;
        *bytes += x->bytes;
    }
    return true;
}

static bool is_question(const struct pms_question *q, size_t n)
{
    return n >= PMS_WIRE_HEAD && q->magic == PMS_WIRE_MAGIC && q->op >= PMS_WIRE_PIN &&
           q->op <= PMS_WIRE_END && q->count <= PMS_WIRE_RANGES &&
           (q->op == PMS_WIRE_READ) == (q->count > 0) &&
           n == PMS_WIRE_HEAD + q->count * sizeof q->range[0];
}

static int make_answer(struct pms_visitor *r, const struct pms_served *s,
                       const struct pms_question *q, unsigned char *to)
{
    if (q->op == PMS_WIRE_PIN)
        return answer_pin(r, s, q->keep != 0, to);
    if (q->op == PMS_WIRE_READ)
        return answer_read(r, s, q, to);
    uint64_t epoch = atomic_load(s->epoch);
    memcpy(to, &epoch, sizeof epoch);
    return PMS_OK;
}

size_t pms_visitors_answer(struct pms_visitors *v, const struct pms_served *s,
                           const struct pms_question *q, size_t n, const struct pms_sender *from,
                           unsigned char *out)
{
    uint64_t bytes, pages = s->undo->map->reserve / PMS_PAGE;
    if (!is_question(q, n) || !add_up(q, pages, &bytes))
        return 0;
    struct pms_visitor **at = find(v, q->reader), *r = *at;
    if (q->op == PMS_WIRE_END && r)
        part_with(v, at);
    if (q->op == PMS_WIRE_END || !(r = welcome(v, q->reader)))
        return 0;
    r->from = *from;
    r->heard_ms = r->looked_ms = now_ms();
    if (q->op != PMS_WIRE_READ)
        bytes = q->op == PMS_WIRE_PIN ? sizeof(struct pms_superblock) : sizeof(uint64_t);
    struct pms_answer head = {.serial = q->serial, .magic = PMS_WIRE_MAGIC};
    memcpy(head.reader, q->reader, sizeof head.reader);
    head.status = make_answer(r, s, q, out + sizeof head);
    head.bytes = head.status == PMS_OK ? bytes : 0;
    memcpy(out, &head, sizeof head);
    return sizeof head + (size_t)head.bytes;
}

void pms_visitors_look(struct pms_visitors *v, bool (*is_gone)(const struct pms_sender *))
{
    int64_t now = now_ms();
    for (struct pms_visitor **at = &v->first, *r; (r = *at);) {
        bool look = now - r->looked_ms > LOOK_MS;
        if (look)
            r->looked_ms = now;
        if (now - r->heard_ms > (r->keep ? IDLE_KEPT_MS : IDLE_MS))
            unpin(r);
        if (look && is_gone(&r->from))
            part_with(v, at);
        else
            at = &r->next;
    }
}

void pms_visitors_close(struct pms_visitors *v)
{
    while (v->first)
        part_with(v, &v->first);
}
