/* Files that are no store of this version: foreign ones, other versions, noise, and numbers at
 * their end. Opening, checking, reading and closing ends in an answer. */
#include "hostile_store.h"

/* ---- other files ---- */

static int open_status(int mode)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(mode, PMS_DOMAIN_AUTO, &e);
    if (pool)
        pms_pool_release(pool);
    return pool ? PMS_OK : e.status;
}

static void check_foreign(const void *bytes, uint64_t n, int expected)
{
    memcpy(image, bytes, n);
    image_bytes = n;
    write_image();
    CHECK(open_status(PMS_MODE_READ) == expected && open_status(PMS_MODE_READ_WRITE) == expected);
    if (n)
        CHECK(open_status(PMS_MODE_APPEND) == expected); /* what is not ours is not replaced */
    CHECK(file_unchanged());
}

static void foreign_files(void)
{
    static unsigned char buffer[SIZE];
    check_foreign("", 0, PMS_E_NOT_A_STORE);
    check_foreign("Dear reader,\nthis is a text.\n", 29, PMS_E_NOT_A_STORE);
    check_foreign("P", 1, PMS_E_NOT_A_STORE);
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE); /* zeros */
    check_foreign(buffer, 1, PMS_E_NOT_A_STORE);
    check_foreign("\x7f"
                  "ELF\2\1\1\0\0\0\0\0\0\0\0\0",
                  16, PMS_E_NOT_A_STORE);
    memcpy(buffer, "PMEMPOOL", 8);
    check_foreign(buffer, 8 * PMS_PAGE, PMS_E_NOT_A_STORE);
    memset(buffer, 'x', sizeof buffer);
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE);
    memcpy(buffer, "PMSTORE\r", 8); /* as a text transfer leaves it */
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE);
}

static void other_versions(void)
{
    struct pms_superblock super;
    for (int field = 0; field < 3; field++) {
        memcpy(image, variants[0].image, variants[0].bytes);
        image_bytes = variants[0].bytes;
        for (uint64_t copy = 0; copy < 2; copy++) {
            memcpy(&super, image + PMS_OFF_SUPER(copy), sizeof super);
            super.version = field == 0 ? PMS_VERSION + 1 : field == 1 ? 0 : PMS_VERSION;
            super.features_incompat = field == 2 ? PMS_FEATURES + 1 : 0;
            super.crc = pms_crc32c(0, &super, offsetof(struct pms_superblock, crc));
            memcpy(image + PMS_OFF_SUPER(copy), &super, sizeof super);
        }
        write_image();
        CHECK(open_status(PMS_MODE_READ) == PMS_E_VERSION &&
              open_status(PMS_MODE_READ_WRITE) == PMS_E_VERSION);
        CHECK(open_status(PMS_MODE_APPEND) == PMS_E_VERSION && file_unchanged());
    }
}

static void foreign_files_are_refused(void) { CHECK(in_child(foreign_files) == 0); }

static void other_versions_are_named(void) { CHECK(in_child(other_versions) == 0); }

static void put_word(uint64_t off, uint64_t word) { memcpy(image + off, &word, sizeof word); }

static const struct {
    unsigned variant;
    uint64_t tx;
} last[] = {
    {0, PMS_TX_MASK},     {1, PMS_TX_MASK}, {0, PMS_TX_MASK - 1}, {2, PMS_TX_MASK},
    {2, PMS_TX_MASK + 1}, {2, ~0ull},       {3, ~0ull - 1},
};
static size_t which;

static void run_last(void)
{
    now = variants + last[which].variant;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    if (last[which].variant < 2)
        put_word(PMS_OFF_ANCHOR, pms_anchor_pack(last[which].tx));
    for (uint64_t copy = 0; copy < 2 && last[which].variant >= 2; copy++) {
        uint64_t off = PMS_OFF_JANCHOR(copy), bytes = offsetof(struct pms_janchor, crc);
        put_word(off + offsetof(struct pms_janchor, tx), last[which].tx);
        seal_crc(image, off, bytes);
    }
    run_trial(&(struct trial){"last transaction", last[which].variant, last[which].tx}, which);
}

/* The last number that a transaction can have: there is no next one. Of the anchor, then of both
 * journal anchors. */
static void numbers_that_run_out_are_answered(void)
{
    for (which = 0; which < sizeof last / sizeof last[0]; which++) {
        int ws = in_child(run_last);
        CHECK(ws == 0);
        if (ws)
            printf("  %s, anchor at transaction %llx: %s\n", variants[last[which].variant].name,
                   (unsigned long long)last[which].tx,
                   WIFSIGNALED(ws) ? strsignal(WTERMSIG(ws)) : "a wrong answer");
    }
}

/* Noise of any size; noise behind a right magic; noise behind a right superblock. */
static void noise(void)
{
    struct trial t = {"noise", 0, 0};
    for (uint64_t n = 0; n < 300 / SLOWER; n++) {
        random_state = n + 77;
        uint64_t keep = n % 3 == 0 ? 0 : n % 3 == 1 ? 8 : PMS_PAGE * (1 + n % 8);
        memcpy(image, variants[n % 4].image, SIZE);
        image_bytes = n % 3 == 2 ? variants[n % 4].bytes : random64() % SIZE;
        for (uint64_t i = keep; i < image_bytes; i++)
            image[i] = (unsigned char)(random64() >> 56);
        t.a = n;
        alarm(SECONDS);
        run_trial(&t, n);
    }
}

static void noise_is_answered(void) { CHECK(in_child(noise) == 0); }

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-foreign-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    for (now = variants; now < variants + 4; now++)
        build();
    now = variants;
    TEST(foreign_files_are_refused);
    TEST(other_versions_are_named);
    TEST(numbers_that_run_out_are_answered);
    TEST(noise_is_answered);
    unlink(path);
    return test_summary();
}
