/* Fuzzing of open, check, a walk over all objects and changes: any bytes give PMS_E_CORRUPT or
 * another status, never a crash, a hang or unbounded memory. `make nightly WHAT=fuzz` runs it
 * guided by coverage (clang's libFuzzer); test_fuzz.c, with seeded inputs, in every build.
 *
 * An input is a list of patches of a whole store, so that nobody need find checksums: first a
 * byte that chooses the store (bit 7: checksums stay wrong), then patches: place (4 bytes),
 * length (1) and that many bytes. A place counts the lines that hold something; with bit 31 all
 * bytes. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "seal.h"

#define SIZE (2u << 20)
#define VARIANTS 4u

static char path[64];
static unsigned char whole[VARIANTS][SIZE], image[SIZE];
static uint32_t line[VARIANTS][SIZE / PMS_LINE], lines[VARIANTS]; /* that hold something */
static struct pms_error e;
static uint64_t opened, refused; /* by a reader */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static struct pms_pool *open_store(int mode, int domain)
{
    struct pms_options o = {.size = SIZE, .mode = mode, .domain = domain, .hot = 1, .force = 1};
    struct pms_pool *pool = NULL;
    return pms_pool_open(path, &o, &pool, &e) == PMS_OK ? pool : NULL;
}

static void must(int status)
{
    if (status != PMS_OK)
        abort();
}

/* Some of everything. A crashed one is the file as it was in the middle of a transaction. */
static void make_store(unsigned variant)
{
    static const unsigned char bytes[300];
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE,
                                       variant & 1 ? PMS_DOMAIN_FILE : PMS_DOMAIN_PROCESS);
    struct pms_new_item items[2] = {{.meta = "i", .meta_bytes = 1, .kind = PMS_OBJECT_VALUE},
                                    {"m", 1, sizeof bytes, bytes, PMS_OBJECT_ARRAY, PMS_FILL_COPY}};
    uint64_t group, list, at;
    if (!pool)
        abort();
    must(pms_object_put_array(pool, 0, "a", 1, "m", 1, 30000, PMS_FILL_ZERO, NULL, 0, 0, &at, &e));
    must(pms_object_group(pool, 0, "g", 1, 1, &group, &e));
    must(pms_object_put_value(pool, group, "v", 1, "value", 5, &e));
    must(pms_object_list(pool, group, "l", 1, 1, &list, &e));
    for (int i = 0; i < 70; i++)
        must(pms_sequence_splice(pool, list, NULL, 0, 0, 0, 1, items, 2, &e));
    must(pms_commit(pool, &e));
    must(pms_object_put_value(pool, group, "w", 1, "other", 5, &e));
    must(pms_object_remove(pool, group, "v", 1, &e));
    int fd = open(path, O_RDONLY);
    if (lseek(fd, 0, SEEK_END) > (off_t)SIZE) /* else every input is a truncated file */
        abort();
    if (variant & 2 && pread(fd, whole[variant], SIZE, 0) < (ssize_t)PMS_OFF_SEGMENTS)
        abort();
    must(pms_pool_close(pool, 1, &e));
    pms_pool_release(pool);
    if (!(variant & 2) && pread(fd, whole[variant], SIZE, 0) < (ssize_t)PMS_OFF_SEGMENTS)
        abort();
    close(fd);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const unsigned char empty[PMS_LINE];
    (void)argc, (void)argv;
    snprintf(path, sizeof path, "/dev/shm/pms-fuzz-%ld", (long)getpid());
    for (unsigned i = 0; i < VARIANTS; i++) {
        make_store(i);
        for (uint32_t at = 0; at < SIZE; at += PMS_LINE)
            if (memcmp(whole[i] + at, empty, PMS_LINE) != 0)
                line[i][lines[i]++] = at;
    }
    return 0;
}

/* ---- check bits made right again, of whatever was changed ---- */

static bool changed(const unsigned char *was, uint64_t off, uint64_t bytes)
{
    return memcmp(image + off, was + off, bytes) != 0;
}

/* entries stay where they were */
static void seal_log(const unsigned char *was, uint64_t off, uint64_t end)
{
    while (off + PMS_LINE <= end) {
        struct pms_entry entry;
        memcpy(&entry, was + off, sizeof entry);
        uint64_t bytes = entry.len <= 32
                             ? PMS_LINE
                             : PMS_LINE + (entry.len + PMS_LINE - 1ull) / PMS_LINE * PMS_LINE;
        if (entry.len == 0 || bytes > end - off)
            return;
        if (changed(was, off, bytes))
            seal_entry(image, SIZE, off);
        off += bytes;
    }
}

static void seal_journal(const unsigned char *was, uint64_t off, uint64_t end)
{
    for (; off + PMS_PAGE <= end; off += PMS_PAGE) {
        struct pms_record record;
        memcpy(&record, was + off, sizeof record);
        if (record.magic == PMS_RECORD_MAGIC && changed(was, off, PMS_PAGE))
            seal_record(image, SIZE, off);
    }
}

static void seal_table(const unsigned char *was, const struct pms_segment *s)
{
    /* a word keeps being one; a bitmap is left alone */
    for (uint64_t i = 0; i < s->data_pages; i++) {
        uint64_t at = s->table_off + i * sizeof(struct pms_pte), word;
        memcpy(&word, image + at, sizeof word);
        uint64_t kind = word >> 44 & 15;
        if (changed(was, at, sizeof word) && kind >= PMS_KIND_FREE && kind <= PMS_KIND_META_SLAB)
            seal_pte(image, s, at);
    }
}

static void seal_all(const unsigned char *was)
{
    struct pms_superblock super;
    memcpy(&super, was, sizeof super);
    const struct pms_segment *s = &super.segment[0];
    for (unsigned copy = 0; copy < 2; copy++) {
        seal_super(image, PMS_OFF_SUPER(copy));
        seal_session(image, PMS_OFF_SESSION(copy));
        seal_janchor(image, PMS_OFF_JANCHOR(copy));
        seal_log(was, PMS_OFF_FASTLOG(copy), PMS_OFF_FASTLOG(copy) + PMS_FASTLOG_BYTES);
    }
    seal_anchor(image);
    seal_journal(was, s->log_off, s->log_off + s->log_bytes);
    seal_table(was, s);
}

/* ---- what a reader and a writer do ---- */

static void walk_list(struct pms_pool *pool, uint64_t list)
{
    struct pms_object o;
    for (uint64_t i = 0; i < 200 && pms_sequence_get(pool, list, NULL, 0, i, 0, &o, &e) == PMS_OK;
         i++)
        ;
}

static void walk(struct pms_pool *pool, uint64_t dir, int depth)
{
    struct pms_object o;
    uint64_t node = 0;
    for (int i = 0; i < 100 && pms_object_next(pool, dir, &node, &o, &e) == PMS_OK && node; i++) {
        if (o.kind == PMS_OBJECT_GROUP && depth < 3)
            walk(pool, o.data, depth + 1);
        if (o.kind == PMS_OBJECT_LIST)
            walk_list(pool, o.data);
    }
}

static void change(struct pms_pool *pool)
{
    const struct pms_new_item item = {.meta = "i", .meta_bytes = 1, .kind = PMS_OBJECT_VALUE};
    uint64_t at;
    pms_object_put_array(pool, 0, "b", 1, "m", 1, 5000, PMS_FILL_ZERO, NULL, 0, 0, &at, &e);
    if (pms_object_group(pool, 0, "g", 1, 0, &at, &e) == PMS_OK &&
        pms_object_list(pool, at, "l", 1, 0, &at, &e) == PMS_OK) {
        pms_sequence_splice(pool, at, NULL, 0, 1, 0, 1, &item, 1, &e);
        pms_sequence_splice(pool, at, NULL, 0, 0, 90, 1, NULL, 0, &e);
    }
    pms_object_remove(pool, 0, "g", 1, &e);
    pms_commit(pool, &e);
    pms_object_remove(pool, 0, "a", 1, &e);
    pms_rollback(pool, &e);
}

static void use(int mode)
{
    static struct pms_check_report r;
    struct pms_pool *pool = open_store(mode, PMS_DOMAIN_AUTO);
    if (mode == PMS_MODE_READ)
        *(pool ? &opened : &refused) += 1;
    if (!pool)
        return;
    pms_check(pool, &r, &e);
    walk(pool, 0, 0);
    if (mode == PMS_MODE_READ_WRITE)
        change(pool);
    pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    unsigned variant = data[0] % VARIANTS;
    memcpy(image, whole[variant], SIZE);
    for (size_t at = 1; at + 5 <= size;) {
        uint32_t place;
        size_t bytes = data[at + 4];
        memcpy(&place, data + at, 4);
        at += 5;
        bytes = bytes < size - at ? bytes : size - at;
        place = place >> 31 ? place % (SIZE - 256)
                            : line[variant][place / PMS_LINE % lines[variant]] + place % PMS_LINE;
        bytes = bytes < SIZE - place ? bytes : SIZE - place;
        memcpy(image + place, data + at, bytes);
        at += bytes;
    }
    if (!(data[0] & 0x80))
        seal_all(whole[variant]);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, image, SIZE) != SIZE)
        abort();
    close(fd);
    use(PMS_MODE_READ);
    use(PMS_MODE_READ_WRITE);
    unlink(path);
    return 0;
}
