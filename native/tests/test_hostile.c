/* Damaged files and files made by an enemy: whatever the bytes, opening, checking, reading and
 * closing ends in an answer. No signal, no hang, no leak of file descriptors; a reader changes
 * no byte.
 *
 * Bits are flipped as they would by accident, and once more with checksums made right again, as
 * an enemy would. Children do it, many flips each: one that dies costs one failure, and the next
 * goes on behind it.
 *
 * PMS_HOSTILE_STEP=1 flips every bit and takes long; the default takes a sample.
 * PMS_HOSTILE_ONLY=variant runs the trials of one store (0 to 3), variant:trial one of them
 * alone. */
#include "hostile_store.h"

static uint64_t step; /* one bit of this many is flipped */

/* ---- what to damage ---- */

/* As it is, and with the checksum made right again. */
static void sealed_region(const char *name, uint64_t off, uint64_t bytes, enum seal seal,
                          uint64_t sample)
{
    region(name, off, bytes, PLAIN, sample);
    region(name, off, bytes, seal, sample * 2);
}

static void fixed_regions(void)
{
    for (uint64_t copy = 0; copy < 2; copy++) {
        sealed_region("superblock's head", PMS_OFF_SUPER(copy), 192, SEAL_SUPER, 8);
        region("superblock", PMS_OFF_SUPER(copy), PMS_PAGE, PLAIN, 1);
        sealed_region("session", PMS_OFF_SESSION(copy), 64, SEAL_SESSION, 8);
        region("session", PMS_OFF_SESSION(copy), sizeof(struct pms_session), PLAIN, 1);
        sealed_region("journal anchor", PMS_OFF_JANCHOR(copy), 40, SEAL_JANCHOR, 8);
        region("journal anchor", PMS_OFF_JANCHOR(copy), sizeof(struct pms_janchor), PLAIN, 1);
    }
    sealed_region("anchor", PMS_OFF_ANCHOR, 8, SEAL_ANCHOR, 1000);
    region("root", PMS_OFF_ROOT, sizeof(struct pms_root), PLAIN, 8);
    region("root page", PMS_OFF_ROOT, PMS_PAGE, PLAIN, 1);
}

static void log_regions(const struct pms_superblock *super)
{
    for (uint64_t parity = 0; parity < 2; parity++) {
        uint64_t off = PMS_OFF_FASTLOG(parity), end = off + PMS_FASTLOG_BYTES;
        /* entry by entry, of whatever transaction */
        for (int i = 0; i < 12 && off + PMS_LINE <= end; i++) {
            struct pms_entry e;
            memcpy(&e, now->image + off, sizeof e);
            if (e.len == 0 || e.len > PMS_FASTLOG_BYTES)
                break;
            sealed_region("undo entry", off, 40, SEAL_ENTRY, i < 4 ? 8 : 2);
            off += e.len <= 32 ? PMS_LINE : PMS_LINE + (e.len + PMS_LINE - 1) / PMS_LINE * PMS_LINE;
        }
    }
    uint64_t log = super->segment[0].log_off;
    for (uint64_t at = 0, seen = 0; at + PMS_PAGE <= super->segment[0].log_bytes && seen < 6;
         at += PMS_PAGE) {
        uint64_t magic;
        memcpy(&magic, now->image + log + at, sizeof magic);
        if (magic != PMS_RECORD_MAGIC)
            continue;
        sealed_region("journal record", log + at,
                      sizeof(struct pms_record) + 3 * sizeof(struct pms_run), SEAL_RECORD, 8);
        region("journal record's images", log + at + PMS_PAGE, PMS_PAGE, PLAIN, 1);
        seen++;
    }
}

static void list_regions(uint64_t list)
{
    struct pms_list_header h;
    struct pms_list_node root, leaf;
    memcpy(&h, now->image + list, sizeof h);
    region("list's header", list, sizeof h, PLAIN, 16);
    if (h.level != 1 || h.root > now->bytes - sizeof root)
        return;
    memcpy(&root, now->image + h.root, sizeof root);
    region("list's root", h.root, 16 + root.used * sizeof root.child[0], PLAIN, 16);
    uint64_t first = root.child[0].node;
    memcpy(&leaf, now->image + first, sizeof leaf);
    region("list's leaf", first, sizeof leaf, PLAIN, 2);
    for (uint32_t i = 0; i < 4; i++)
        region("list's item", leaf.item[i], PMS_LINE, PLAIN, 8);
}

static void directory_regions(uint64_t dir)
{
    struct pms_dir_header h;
    if (dir == 0 || dir > now->bytes - sizeof h)
        return;
    memcpy(&h, now->image + dir, sizeof h);
    region("directory's header", dir, sizeof h, PLAIN, 16);
    region("directory's table", h.table, h.slots * sizeof(struct pms_dir_slot), PLAIN, 4);
    for (uint64_t node = h.first; node && node < now->bytes - sizeof(struct pms_node);) {
        struct pms_node n;
        memcpy(&n, now->image + node, sizeof n);
        region("node", node, sizeof n, PLAIN, 8);
        region("node's name and meta", node + sizeof n, n.name_bytes + n.meta_bytes, PLAIN, 1);
        if (n.kind == PMS_OBJECT_GROUP)
            directory_regions(n.data);
        if (n.kind == PMS_OBJECT_LIST)
            list_regions(n.data);
        node = n.next;
    }
}

static void choose_regions(void)
{
    struct pms_superblock super;
    struct pms_root root;
    memcpy(&super, now->image + PMS_OFF_SUPER(0), sizeof super);
    memcpy(&root, now->image + PMS_OFF_ROOT, sizeof root);
    now->regions = 0;
    fixed_regions();
    region("page table", super.segment[0].table_off, PMS_PAGE, PLAIN, 1);
    sealed_region("page table's head", super.segment[0].table_off, 52 * sizeof(struct pms_pte),
                  SEAL_PTE, 4);
    log_regions(&super);
    directory_regions(root.directory);
}

/* ---- trials: a number becomes a damaged file ---- */

static uint64_t stride(const struct region *r)
{
    uint64_t s = step / r->sample;
    return s ? s : 1;
}

static uint64_t flips(const struct region *r) { return (r->bytes * 8 + stride(r) - 1) / stride(r); }

static void flip(const struct region *r, uint64_t n, struct trial *t)
{
    uint64_t bit = n * stride(r);
    if (stride(r) > 1) /* not the same bit of every byte */
        bit += (n * 7919 + r->off / 64) % stride(r);
    bit %= r->bytes * 8;
    image[r->off + bit / 8] ^= (unsigned char)(1u << bit % 8);
    seal(r, image, bit / 8);
    *t = (struct trial){r->name, r->off + bit / 8, bit % 8 + (r->seal != PLAIN ? 100 : 0)};
}

static void fill_page(uint64_t page, int how)
{
    for (uint64_t i = 0; i < PMS_PAGE; i++)
        image[page * PMS_PAGE + i] = how == 0   ? 0
                                     : how == 1 ? 0xff
                                                : (unsigned char)(random64() >> 56);
}

static void copy_page(uint64_t to, uint64_t from)
{
    memcpy(image + to * PMS_PAGE, now->image + from * PMS_PAGE, PMS_PAGE);
}

/* Trial n of this variant. false: there are no more. */
static bool damage(uint64_t n, struct trial *t)
{
    uint64_t pages = now->bytes / PMS_PAGE, fine = step > 32 ? 17 * 512 * SLOWER : 512;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    random_state = 0x9e3779b97f4a7c15ull ^ (n + 1);
    for (uint32_t i = 0; i < now->regions; i++) {
        if (n < flips(&now->region[i])) {
            flip(&now->region[i], n, t);
            return true;
        }
        n -= flips(&now->region[i]);
    }
    uint64_t every = step > 32 ? 8 * SLOWER : 1, cuts = now->bytes / fine;
    if (n < pages + cuts) { /* cut short at every page; at sectors, a sample of them */
        image_bytes = n < pages ? n * PMS_PAGE : (n - pages) * fine + 512;
        *t = (struct trial){"cut at", image_bytes, 0};
        return true;
    }
    n -= pages + cuts;
    if (n < 3 * pages / every) {
        uint64_t page = n / 3 * every + n % every;
        page = page < pages ? page : pages - 1;
        *t = (struct trial){"page overwritten", page * PMS_PAGE, n % 3};
        fill_page(page, (int)(n % 3));
        return true;
    }
    n -= 3 * pages / every;
    if (n < 200 / SLOWER) { /* a page in another's place: right checksums, wrong place */
        uint64_t to = random64() % pages, from = random64() % pages;
        *t = (struct trial){"page copied", to * PMS_PAGE, from * PMS_PAGE};
        copy_page(to, from);
        return true;
    }
    return false;
}

/* ---- children ---- */

struct shared {
    _Atomic uint64_t trial;
    _Atomic uint64_t failed;
    _Atomic bool done;
};
static struct shared *shared;

static void child(uint64_t from, uint64_t to)
{
    struct trial t;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    for (uint64_t n = from; n < to; n++) {
        atomic_store(&shared->trial, n);
        if (!damage(n, &t)) {
            atomic_store(&shared->done, true);
            break;
        }
        alarm(SECONDS);
        run_trial(&t, n);
    }
    fflush(stdout);
    atomic_fetch_add(&shared->failed, (uint64_t)test_checks_failed);
    _exit(0);
}

#define BATCH 1000u
#define DEATHS_MAX 20

/* Runs trials [from, to) in children; one that dies is told, and the next trial gets another
 * child. */
static void run_trials(uint64_t from, uint64_t to)
{
    int deaths = 0;
    atomic_store(&shared->done, false);
    atomic_store(&shared->failed, 0);
    while (from < to && !atomic_load(&shared->done) && deaths < DEATHS_MAX) {
        int ws = 0;
        uint64_t end = to - from > BATCH ? from + BATCH : to;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            test_checks_failed = 0;
            child(from, end);
        }
        waitpid(pid, &ws, 0);
        if (ws == 0) {
            from = end;
            continue;
        }
        struct trial t = {"", 0, 0};
        from = atomic_load(&shared->trial) + 1;
        damage(from - 1, &t);
        printf("  %s, trial %llu: %s %llu, %llu: killed by %s\n", now->name,
               (unsigned long long)from - 1, t.name, (unsigned long long)t.a,
               (unsigned long long)t.b, WIFSIGNALED(ws) ? strsignal(WTERMSIG(ws)) : "itself");
        deaths++;
    }
    CHECK(deaths == 0);
    CHECK(atomic_load(&shared->failed) == 0);
}

static void check_sound(void)
{
    static struct pms_check_report r;
    struct pms_error e;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    write_image();
    struct pms_pool *pool = open_store(PMS_MODE_READ, PMS_DOMAIN_AUTO, &e);
    CHECK(pool && pool->opened.info.clean == !now->crashed);
    if (!pool)
        return;
    CHECK(pms_check(pool, &r, &e) == PMS_OK && r.problem_count == 0 && r.names == 7 &&
          r.lists == 1);
    CHECK((pool->opened.info.undone_entries > 0) ==
          (now->crashed && now->domain == PMS_DOMAIN_PROCESS));
    pms_pool_release(pool);
    CHECK(file_unchanged());
}

static void the_store_is_sound(void)
{
    build();
    choose_regions();
    CHECK(in_child(check_sound) == 0);
}

static void every_damage_is_answered(void)
{
    const char *only = getenv("PMS_HOSTILE_ONLY");
    unsigned variant = 0;
    unsigned long long n = 0;
    int asked = only ? sscanf(only, "%u:%llu", &variant, &n) : 0;
    if (asked > 0 && variant != (unsigned)(now - variants))
        return;
    run_trials(n, asked == 2 ? n + 1 : UINT64_MAX);
}

int main(void)
{
    const char *asked = getenv("PMS_HOSTILE_STEP");
    step = asked ? strtoull(asked, NULL, 10) : 800 * SLOWER;
    step = step ? step : 1;
    snprintf(path, sizeof path, "%s/pms-test-hostile-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (now = variants; now < variants + 4; now++) {
        printf("%s: ", now->name);
        TEST(the_store_is_sound);
        printf("%s: ", now->name);
        TEST(every_damage_is_answered);
        printf("  %llu trials in %u regions\n", (unsigned long long)atomic_load(&shared->trial),
               now->regions);
    }
    unlink(path);
    return test_summary();
}
