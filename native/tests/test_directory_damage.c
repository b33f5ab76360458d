/* Directories with seeded damage and hostile bytes. */
#include "directory_store.h"

#ifdef __SANITIZE_THREAD__
#define BIT_STEP 7u /* one thread: nothing to see for it in bits */
#else
#define BIT_STEP 1u
#endif

/* ---- damage ---- */

#define VICTIMS 12u

struct victim { /* a small directory and its bytes */
    struct store s;
    uint64_t node[VICTIMS], data[VICTIMS];
    struct {
        uint64_t off, bytes;
    } part[2 + VICTIMS];
};

static void victim_open(struct victim *x)
{
    char name[32];
    struct pms_object o;
    store_open(&x->s, 256);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        x->data[i] = i % 3 ? user_block(&x->s, 100) : 0;
        CHECK(pms_dir_put(&x->s.ctx, x->s.dir, name, (uint32_t)strlen(name),
                          x->data[i] ? PMS_OBJECT_ARRAY : PMS_OBJECT_VALUE, name, i, x->data[i],
                          x->data[i] ? 100 : 0, NULL) == PMS_OK);
    }
    CHECK(put(&x->s, "gone", "", 0) == PMS_OK && put(&x->s, "gone too", "", 0) == PMS_OK);
    CHECK(drop(&x->s, "gone") == PMS_OK && drop(&x->s, "gone too") == PMS_OK);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        CHECK(find(&x->s, name, &o) == PMS_OK);
        x->node[i] = o.node;
        x->part[2 + i].off = o.node;
        x->part[2 + i].bytes = sizeof(struct pms_node) + o.name_bytes + o.meta_bytes;
    }
    struct pms_dir_view v;
    CHECK(pms_dir_load(&x->s.ctx, x->s.dir, &v, NULL) == PMS_OK);
    x->part[0].off = x->s.dir;
    x->part[0].bytes = sizeof v.h;
    x->part[1].off = v.h.table;
    x->part[1].bytes = v.h.slots * sizeof *v.slot;
    commit(&x->s);
    check_sound(&x->s);
}

/* Everything one can do, on whatever lies there. Only that it ends, and ends well, is checked. */
static bool exercise(struct victim *x)
{
    struct pms_object o;
    char name[32];
    uint64_t node = 0, n = 0, owned;
    bool sound = check(&x->s, &owned) == PMS_OK;
    while (pms_dir_next(&x->s.ctx, x->s.dir, &node, &o, &x->s.error) == PMS_OK && node)
        CHECK(n++ < 10 * VICTIMS);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        if (find(&x->s, name, &o) == PMS_OK) { /* what is handed out may be read */
            volatile uint32_t sum = pms_crc32c(pms_crc32c(0, o.name, o.name_bytes), o.meta,
                                               o.meta_bytes);
            (void)sum;
        }
    }
    for (uint32_t i = 0; i < 60; i++) {
        sprintf(name, "%u", i % (2 * VICTIMS));
        if (i % 4 == 3)
            drop(&x->s, name);
        else
            put(&x->s, name,
                "01234567890123456789012345678901234567890123456789012345678901234567890123456789",
                i % 75);
    }
    rollback(&x->s);
    return sound;
}

/* What a directory cannot know: sizes that are still possible, and data that is another's (its
 * owner's count tells). */
static bool may_be_sound(uint64_t part, uint64_t byte)
{
    return part >= 2 &&
           ((byte >= offsetof(struct pms_node, data) && byte < offsetof(struct pms_node, kind)) ||
            (byte >= offsetof(struct pms_node, meta_bytes) &&
             byte < offsetof(struct pms_node, name_bytes)) ||
            (byte >= offsetof(struct pms_node, meta_room) &&
             byte < offsetof(struct pms_node, reserved)));
}

static void test_every_bit(void)
{
    struct victim x;
    uint64_t bits = 0;
    victim_open(&x);
    for (unsigned k = 0; k < 2 + VICTIMS; k++) {
        unsigned char *p = pms_map_at(&x.s.map, x.part[k].off);
        for (uint64_t bit = 0; bit < x.part[k].bytes * 8; bit += BIT_STEP, bits++) {
            p[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool sound = exercise(&x);
            p[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool in_meta = k >= 2 && bit / 8 >= x.part[k].bytes - (k - 2); /* any meta is sound */
            CHECK(in_meta ? sound : !sound || may_be_sound(k, bit / 8));
        }
    }
    printf("     %llu bits flipped\n", (unsigned long long)bits);
    check_sound(&x.s);
    store_close(&x.s);
}

static void test_hostile_words(void)
{
    struct victim x;
    victim_open(&x);
    for (uint32_t i = 0; i < 60000 / SLOWER; i++) {
        uint64_t *word[3], old[3], n = 1 + rnd(3);
        for (uint64_t j = 0; j < n; j++) {
            uint64_t k = rnd(3) ? rnd(2 + VICTIMS) : 0;
            const uint64_t interesting[] = {0,
                                            1,
                                            UINT64_MAX,
                                            64,
                                            x.s.dir,
                                            x.part[1].off,
                                            x.node[rnd(VICTIMS)],
                                            x.node[rnd(VICTIMS)],
                                            x.data[rnd(VICTIMS)],
                                            x.s.super.file_bytes - 64,
                                            x.s.super.segment[0].table_off,
                                            x.s.dir + 64,
                                            rnd(1ull << 40) & ~63ull,
                                            rnd(80)};
            word[j] = (uint64_t *)pms_map_at(&x.s.map, x.part[k].off) + rnd(x.part[k].bytes / 8);
            old[j] = *word[j];
            *word[j] = interesting[rnd(sizeof interesting / sizeof *interesting)];
        }
        exercise(&x);
        while (n--)
            *word[n] = old[n];
    }
    check_sound(&x.s);
    store_close(&x.s);
}

enum seed {
    COUNT_LESS,
    COUNT_MORE,
    USED_MORE,
    SLOTS_HALF,
    SLOTS_ODD,
    TABLE_ELSEWHERE,
    FIRST_SECOND,
    LAST_EARLIER,
    HEADER_RESERVED,
    SLOT_EMPTIED,
    SLOT_HASH,
    SLOT_TWICE,
    DELETED_HASH,
    SLOT_MOVED,
    NODE_PREV,
    NODE_NEXT_SKIPS,
    NODE_CYCLE,
    NODE_HASH,
    NODE_NAME,
    NODE_NAME_TWICE,
    NODE_NAME_BAD,
    NODE_KIND,
    NODE_META,
    NODE_ROOM,
    NODE_RESERVED,
    DATA_ELSEWHERE,
    DATA_LONGER,
    DATA_OF_VALUE,
    DATA_OF_ENGINE,
    SEEDS
};

static void damage_header(const struct victim *x, enum seed seed, struct pms_dir_header *h)
{
    switch (seed) {
    case COUNT_LESS: h->count--; break;
    case COUNT_MORE:
        h->count++;
        h->used = h->count > h->used ? h->count : h->used;
        break;
    case USED_MORE: h->used++; break;
    case SLOTS_HALF: h->slots /= 2; break;
    case SLOTS_ODD: h->slots--; break;
    case TABLE_ELSEWHERE: h->table = x->node[0]; break;
    case FIRST_SECOND: h->first = x->node[1]; break;
    case LAST_EARLIER: h->last = x->node[VICTIMS - 2]; break;
    default: h->reserved[1] = 1; break;
    }
}

static void damage_slot(const struct victim *x, enum seed seed, struct pms_dir_slot *table)
{
    uint64_t i = 0, j, empty = 0;
    while (table[i].node != x->node[5])
        i++;
    for (j = i + 1; table[j % 64].node <= PMS_DIR_DELETED; j++) {
    }
    while (table[empty].node != 0 || table[(empty + 63) % 64].node != 0 ||
           pms_dir_home(table[i].hash, 64) == empty)
        empty++; /* an empty slot after an empty slot: nobody's way leads there */
    switch (seed) {
    case SLOT_EMPTIED: table[i] = (struct pms_dir_slot){0, 0}; break;
    case SLOT_HASH: table[i].hash ^= 1; break;
    case SLOT_TWICE: table[i] = table[j % 64]; break;
    case DELETED_HASH: table[empty].hash = 1; break;
    default:
        table[empty] = table[i];
        table[i] = (struct pms_dir_slot){0, 0};
        break;
    }
}

static void damage_node(const struct victim *x, enum seed seed, struct pms_node *n)
{
    unsigned char *name = (unsigned char *)(n + 1);
    switch (seed) {
    case NODE_PREV: n->prev = x->node[1]; break;
    case NODE_NEXT_SKIPS: n->next = x->node[7]; break;
    case NODE_CYCLE: n->next = x->node[3]; break;
    case NODE_HASH: n->hash ^= 1; break;
    case NODE_NAME: name[0] = 'z'; break;
    case NODE_NAME_TWICE: name[0] = '4'; break; /* another node's */
    case NODE_NAME_BAD: name[0] = 0x80; break;
    case NODE_KIND: n->kind = 4; break;
    case NODE_META: n->meta_bytes = n->meta_room + 1; break;
    case NODE_ROOM: n->meta_room += 64; break;
    case NODE_RESERVED: n->reserved = 1; break;
    case DATA_ELSEWHERE: n->data += 64; break;
    case DATA_LONGER: n->data_bytes = 129; break;
    case DATA_OF_VALUE: n->kind = PMS_OBJECT_VALUE; break;
    default:
        n->data = x->node[0];
        n->data_bytes = 10;
        break;
    }
}

static void test_check_finds(void)
{
    for (enum seed seed = 0; seed < SEEDS; seed++) {
        struct victim x;
        uint64_t owned;
        victim_open(&x);
        if (seed <= HEADER_RESERVED)
            damage_header(&x, seed, pms_map_at(&x.s.map, x.s.dir));
        else if (seed <= SLOT_MOVED)
            damage_slot(&x, seed, pms_map_at(&x.s.map, x.part[1].off));
        else
            damage_node(&x, seed, pms_map_at(&x.s.map, x.node[5]));
        CHECK(check(&x.s, &owned) == PMS_E_CORRUPT && x.s.error.what[0] && x.s.error.offset);
        store_close(&x.s);
    }
}

static int stop_at_node(void *arg, uint64_t off, const struct pms_object *object)
{
    *(uint64_t *)arg = off;
    return object ? 77 : 0;
}

static void test_check_stops(void)
{
    struct victim x;
    uint64_t off;
    victim_open(&x);
    CHECK(pms_dir_check(&x.s.ctx, x.s.dir, stop_at_node, &off, NULL) == 77 && off == x.node[0]);
    store_close(&x.s);
}

int main(void)
{
    TEST(test_check_finds);
    TEST(test_check_stops);
    TEST(test_every_bit);
    TEST(test_hostile_words);
    return test_summary();
}
