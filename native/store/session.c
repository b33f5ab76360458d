#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* statx */
#endif
#include "store/session.h"

#include <fcntl.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "seam/footer.h"
#include "store/open.h"

/* What tells a file from its copies. Not the device, whose number may be another after each
 * restart. */
struct identity {
    uint64_t inode;
    int64_t born_ns; /* 0: the file system does not say */
};

static struct identity identity_of(int fd)
{
    struct statx x;
    struct identity id = {0};
    if (statx(fd, "", AT_EMPTY_PATH, STATX_INO | STATX_BTIME, &x) != 0 || !(x.stx_mask & STATX_INO))
        return id;
    id.inode = x.stx_ino;
    if (x.stx_mask & STATX_BTIME)
        id.born_ns = x.stx_btime.tv_sec * 1000000000ll + x.stx_btime.tv_nsec;
    return id;
}

/* By the moment of its creation where both are known: a copy is younger, and no number of a file
 * is given twice at one moment. */
static bool is_copy(const struct pms_session *s, int fd)
{
    struct identity now = identity_of(fd);
    if (s->born_ns && now.born_ns)
        return s->born_ns != now.born_ns;
    return s->inode && now.inode && s->inode != now.inode;
}

/* Where the file system does not say when it was made, a copy may have the same number elsewhere.
 * Of a store that was left open the record says what was backed at its open. */
uint64_t pms_session_backed(const struct pms_pool *pool)
{
    const struct pms_session *s = &pool->session;
    if (!s->born_ns || s->born_ns != identity_of(pool->opened.fd).born_ns)
        return 0;
    if (s->state == PMS_SESSION_CLEAN)
        return s->backed;
    return s->footer ? pms_footer_backed(pool->opened.fd, pool->super.file_bytes) : 0;
}

static bool known(const uint8_t boot[16])
{
    static const uint8_t none[16];
    return memcmp(boot, none, 16) != 0;
}

/* What survives its process alone, left open when the machine went down, may be torn: nobody can
 * tell. */
static int check_machine(const struct pms_session *s, struct pms_error *error)
{
    uint8_t boot[16];
    pms_boot_id(boot);
    if (s->domain != PMS_DOMAIN_PROCESS && s->domain != PMS_DOMAIN_EMULATED)
        return PMS_OK;
    if (!known(boot) || !known(s->boot_id))
        return pms_fail(error, PMS_E_UNCLEAN,
                        "the machine may have restarted while the store was open: the system does "
                        "not tell (/proc/sys/kernel/random/boot_id cannot be read)");
    if (memcmp(boot, s->boot_id, 16) == 0)
        return PMS_OK;
    return pms_fail(error, PMS_E_UNCLEAN, "the machine restarted while the store was open");
}

int pms_session_check(const struct pms_pool *pool, const struct pms_options *o,
                      struct pms_error *error)
{
    const struct pms_session *s = &pool->session;
    if (s->state == PMS_SESSION_CLEAN || o->force)
        return PMS_OK;
    return check_machine(s, error);
}

bool pms_session_is_before(const struct pms_pool *pool, uint64_t tx, uint64_t entries)
{
    const struct pms_session *s = &pool->session;
    bool kept = s->footer || s->state == PMS_SESSION_CLEAN;
    return !is_copy(s, pool->opened.fd) ||
           (kept && pms_footer_allows(pool->opened.fd, pool->super.file_bytes, tx, entries));
}

int pms_session_check_copy(const struct pms_pool *pool, uint64_t tx, uint64_t entries,
                           struct pms_error *error)
{
    if (pool->opened.forced || pms_session_is_before(pool, tx, entries))
        return PMS_OK;
    return pms_fail(
        error, PMS_E_COPIED,
        "a copy that was made while a process wrote to the store: parts of it are of different "
        "moments");
}

static int64_t realtime_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000ll + t.tv_nsec;
}

int pms_session_plan(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_session *s = &pool->session;
    struct identity id = identity_of(pool->opened.fd);
    pool->opened.info.clean = s->state == PMS_SESSION_CLEAN;
    s->opens++;
    if (s->state == PMS_SESSION_DIRTY)
        s->unclean++;
    s->state = PMS_SESSION_DIRTY;
    s->domain = pool->opened.domain;
    s->pid = getpid();
    s->opened_ns = realtime_ns();
    s->inode = id.inode;
    s->born_ns = id.born_ns;
    /* a full disk: copies are refused */
    s->footer = pms_footer_reserve(pool->opened.fd, pool->super.file_bytes, NULL) == PMS_OK;
    pms_boot_id(s->boot_id);
    bool drawn = getrandom(s->secret, sizeof s->secret, 0) == sizeof s->secret;
    if (!pool->hold.tag) /* its log was written with the nonce that is there */
        drawn = drawn && getrandom(&s->nonce, sizeof s->nonce, 0) == sizeof s->nonce;
    if (!drawn)
        return pms_fail_errno(error, "reading randomness");
    /* the logs are empty, and hold nothing that is valid from now on */
    pool->persist.log_seed = pms_session_seed(s);
    return PMS_OK;
}

int pms_session_begin(struct pms_pool *pool, struct pms_error *error)
{
    int status = PMS_OK;
    pool->session.backed = pms_backing_known(&pool->undo.charge.backing);
    /* both: were one damaged, the other would say that nothing was open */
    for (int copy = 0; copy < 2 && status == PMS_OK; copy++)
        status = pms_session_write(pool->opened.fd, &pool->persist, &pool->session, error);
    return status;
}
