#include "seam/footer.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0x746f6f66736d70ull /* "pmsfoot" */

/* Not through the seam, as nothing here: no state lies in this page, and an image that a crash
 * test makes has none. */
int pms_footer_reserve(int fd, uint64_t file_bytes, struct pms_error *error)
{
    do
        errno = posix_fallocate(fd, (off_t)file_bytes, PMS_PAGE);
    while (errno == EINTR);
    return errno ? pms_fail_errno(error, "reserving the file's last page") : PMS_OK;
}

void pms_footer_begin(struct pms_map *m, uint64_t tx, uint64_t entries)
{
    struct pms_footer none = {0};
    void *page = mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, (off_t)m->bytes);
    if (page == MAP_FAILED) {
        ssize_t ignored = pwrite(m->fd, &none, sizeof none, (off_t)m->bytes);
        (void)ignored;
        return;
    }
    m->footer = page;
    atomic_store(&m->footer->backed, 0);
    pms_footer_note(m, tx, entries);
    m->footer->magic = MAGIC;
}

void pms_footer_end(struct pms_map *m)
{
    if (!m->footer)
        return;
    m->footer->magic = 0;
    pms_footer_close(m);
}

void pms_footer_close(struct pms_map *m)
{
    if (m->footer)
        munmap(m->footer, PMS_PAGE);
    m->footer = NULL;
}

bool pms_footer_allows(int fd, uint64_t file_bytes, uint64_t tx, uint64_t entries)
{
    struct pms_footer f;
    ssize_t n = pms_persist_read(fd, &f, sizeof f, file_bytes);
    if (n == 0)
        return true;
    if (n != (ssize_t)sizeof f || f.magic != MAGIC)
        return false;
    /* Transactions are told apart by their low bits: a copy takes less time than it takes to
     * come to the same ones again. */
    int64_t later = (int64_t)(f.word - pms_footer_pack(tx, 0)) >> PMS_FOOTER_ENTRY_BITS;
    return later < 0 || (later == 0 && (f.word & PMS_FOOTER_ALL) <= entries);
}

uint64_t pms_footer_backed(int fd, uint64_t file_bytes)
{
    struct pms_footer f;
    ssize_t n = pms_persist_read(fd, &f, sizeof f, file_bytes);
    return n == (ssize_t)sizeof f && f.magic == MAGIC ? f.backed : 0;
}
