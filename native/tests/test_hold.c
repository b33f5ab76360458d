/* The held version in the byte-addressable domains, by crash points. */
#include "hold_stories.h"

/* A log that somebody made: its checksum is right, but not where it belongs. */
static void an_entry_of_no_place_is_refused(void)
{
    static const uint64_t target[] = {0, PMS_OFF_ANCHOR, 1ull << 40, PMS_OFF_SEGMENTS + (1 << 20)};
    for (unsigned i = 0; i < sizeof target / sizeof *target; i++) {
        struct pms_error e;
        struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hold = 1};
        copy_file(base_path, path);
        struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
        small(p);
        commit(p);
        uint32_t seed = p->persist.log_seed;
        uint64_t at = PMS_OFF_FASTLOG(p->hold.tag & 1);
        shut(p, 0);
        struct {
            struct pms_entry head;
            unsigned char image[32];
        } line;
        int fd = open(path, O_RDWR);
        CHECK(pread(fd, &line, sizeof line, (off_t)at) == (ssize_t)sizeof line);
        CHECK(line.head.len == 32 && line.head.target == PMS_OFF_ROOT);
        line.head.target = target[i];
        line.head.crc = pms_crc32c(pms_crc32c(seed, &line.head, 28), line.image, 32);
        CHECK(pwrite(fd, &line, sizeof line, (off_t)at) == (ssize_t)sizeof line);
        close(fd);
        CHECK(pms_pool_open(path, &o, &p, &e) == PMS_E_CORRUPT);
        o.mode = PMS_MODE_READ;
        CHECK(pms_pool_open(path, &o, &p, &e) == PMS_E_CORRUPT);
    }
}

int main(void)
{
    static const struct model model[] = {
        {PMS_DOMAIN_PROCESS, false, false}, {PMS_DOMAIN_EMULATED, false, false},
        {PMS_DOMAIN_EMULATED, true, false}, {PMS_DOMAIN_PROCESS, false, true},
        {PMS_DOMAIN_EMULATED, false, true}, {PMS_DOMAIN_EMULATED, true, true},
    };
    return tell_stories("test-hold", model, sizeof model / sizeof *model,
                        an_entry_of_no_place_is_refused);
}
