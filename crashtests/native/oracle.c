#include "oracle.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "trace.h"
#include "workload.h"

#define HANG_MS 20000

bool oracle_allows_leaks;
bool oracle_knows_history = true;

struct shared {
    struct question q;
    struct verdict v;
};
struct oracle {
    struct shared *shared;
    pid_t child;
    int to, from;
};

/* ---- in the child ---- */

static struct verdict bad(const char *what, const struct pms_error *e)
{
    struct verdict v = {0};
    snprintf(v.message, sizeof v.message, "%s%s%.120s (%d)", what, e ? ": " : "", e ? e->what : "",
             e ? e->status : 0);
    return v;
}

static bool is_allowed(const struct question *q, uint32_t digest)
{
    for (uint32_t i = 0; i < q->allowed_count; i++)
        if (q->allowed[i] == digest)
            return true;
    return false;
}

/* The file as it is now, mapped: kept between questions, for most of them are about the same
 * file. NULL: it is not there. */
static const unsigned char *look(const char *path, uint64_t *bytes)
{
    static struct stat seen[4];
    static const unsigned char *map[4];
    static unsigned next;
    struct stat st;
    unsigned i = 0;
    if (stat(path, &st) != 0 || st.st_size > (off_t)TRACE_MAX_FILE)
        return NULL;
    *bytes = (uint64_t)st.st_size;
    /* mapped: no other file has its number */
    while (i < 4 && !(map[i] && seen[i].st_ino == st.st_ino && seen[i].st_dev == st.st_dev))
        i++;
    if (i < 4)
        return map[i];
    i = next++ % 4;
    if (map[i])
        munmap((void *)(uintptr_t)map[i], TRACE_MAX_FILE);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *p = fd < 0 ? MAP_FAILED : mmap(NULL, TRACE_MAX_FILE, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    map[i] = p == MAP_FAILED ? NULL : p;
    seen[i] = st;
    return map[i];
}

static bool find_data(const char *path, bool *page)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool found = fd >= 0 && trace_find_data(fd, page);
    if (fd >= 0)
        close(fd);
    return found;
}

struct copy {
    unsigned char *at;
    uint64_t bytes;
    bool page[TRACE_MAX_FILE / PMS_PAGE];
};

static bool copy_of(const char *path, struct copy *c)
{
    const unsigned char *now = look(path, &c->bytes);
    if (!c->at)
        c->at = malloc(TRACE_MAX_FILE);
    if (!now || !c->at || !find_data(path, c->page))
        return false;
    for (uint64_t p = 0; p * PMS_PAGE < c->bytes; p++)
        if (c->page[p])
            memcpy(c->at + p * PMS_PAGE, now + p * PMS_PAGE, PMS_PAGE);
    return true;
}

/* What an opening may write though it undoes nothing: who opened and when, the log with its
 * anchor, the footer. Everything else is state. */
static bool is_state(uint64_t page_off, uint64_t footer_off)
{
    bool session = page_off == PMS_OFF_SESSION(0) || page_off == PMS_OFF_SESSION(1);
    return !session && page_off != PMS_OFF_ANCHOR && page_off != footer_off &&
           (page_off < PMS_OFF_FASTLOG(0) || page_off >= PMS_OFF_SEGMENTS);
}

/* Offset of the first byte of state that differs from the copy; -1: none. footer_off: of the
 * page that is no state; 0: every byte counts. */
static int64_t first_change(const char *path, const struct copy *copy, uint64_t footer_off)
{
    static const unsigned char zeros[PMS_PAGE];
    static bool data[TRACE_MAX_FILE / PMS_PAGE];
    uint64_t bytes = 0;
    const unsigned char *now = look(path, &bytes);
    if (!now || bytes != copy->bytes || !find_data(path, data))
        return 0;
    for (uint64_t p = 0; p * PMS_PAGE < bytes; p++) {
        const unsigned char *a = data[p] ? now + p * PMS_PAGE : zeros,
                            *b = copy->page[p] ? copy->at + p * PMS_PAGE : zeros;
        if (a != b && (!footer_off || is_state(p * PMS_PAGE, footer_off)) &&
            memcmp(a, b, PMS_PAGE) != 0)
            for (uint64_t i = 0;; i++)
                if (a[i] != b[i])
                    return (int64_t)(p * PMS_PAGE + i);
    }
    return -1;
}

static bool transact(struct pms_pool *pool, struct pms_error *e)
{
    struct pms_object o;
    if (pms_object_find(pool, 0, "keep", 4, &o, e) != PMS_OK)
        return false;
    *(uint32_t *)(void *)(pool->map.user + o.data + 60) ^= 1;
    return pms_object_put_value(pool, 0, "after", 5, "crash", 5, e) == PMS_OK &&
           pms_commit(pool, e) == PMS_OK;
}

static bool sound(const struct pms_check_report *r)
{
    return r->problem_count == 0 || (oracle_allows_leaks && r->problem_count == r->leaks);
}

/* What may be torn is not opened, and nothing else is said of it. */
static bool refused(const struct question *q, const struct pms_error *e)
{
    return q->restarted && e->status == PMS_E_UNCLEAN;
}

static struct verdict judge_recovered(const struct question *q)
{
    static struct pms_check_report r;
    struct pms_error e = {0};
    uint32_t shown = 0;
    static struct copy copy;
    machine_restarted = q->restarted;
    if (q->thorough) { /* mode r shows the same state and changes nothing */
        bool copied = copy_of(q->path, &copy);
        struct pms_pool *reader = wl_open(q->path, PMS_DOMAIN_AUTO, PMS_MODE_READ, &e);
        if (!reader)
            return refused(q, &e) ? (struct verdict){.ok = true} : bad("open for reading", &e);
        shown = wl_digest(reader);
        pms_pool_release(reader);
        if (!copied || first_change(q->path, &copy, 0) >= 0)
            return bad("opening for reading changed the file", NULL);
    }
    struct pms_pool *pool = wl_open(q->path, q->domain, PMS_MODE_READ_WRITE, &e);
    if (!pool)
        return refused(q, &e) ? (struct verdict){.ok = true} : bad("open", &e);
    struct verdict v = {.ok = true, .digest = wl_digest(pool)};
    uint64_t epoch = pms_epoch(pool);
    int checked = pms_check(pool, &r, &e);
    bool whole = !oracle_knows_history || wl_history_whole(pool);
    int closed = pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
    if (!is_allowed(q, v.digest)) {
        struct verdict wrong = bad(
            "the recovered state is neither the last commit nor the one in flight", NULL);
        size_t n = strlen(wrong.message);
        snprintf(wrong.message + n, sizeof wrong.message - n, " (epoch %lu)", (unsigned long)epoch);
        return wrong;
    }
    if (q->thorough && shown != v.digest)
        return bad("mode r shows another state than recovery makes", NULL);
    if (!whole)
        return bad("the history is a mixture of two records", NULL);
    if (checked != PMS_OK || !sound(&r))
        return bad(r.problem_count ? r.problem[0] : "check", checked == PMS_OK ? NULL : &e);
    if (closed != PMS_OK)
        return bad("close", &e);
    bool copied = copy_of(q->path, &copy);
    pool = wl_open(q->path, q->domain, PMS_MODE_READ_WRITE, &e);
    if (!pool)
        return bad("second open", &e);
    int64_t change = copied ? first_change(q->path, &copy, pool->map.bytes) : 0;
    if (change >= 0) {
        pms_pool_release(pool);
        struct verdict wrong = bad("opening again changed the byte at", NULL);
        size_t n = strlen(wrong.message);
        snprintf(wrong.message + n, sizeof wrong.message - n, " %ld", (long)change);
        return wrong;
    }
    bool worked = transact(pool, &e);
    uint32_t after = wl_digest(pool);
    closed = pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
    if (!worked || closed != PMS_OK)
        return bad("a transaction after recovery", &e);
    if (after == v.digest)
        return bad("a transaction after recovery changed nothing", NULL);
    if (!q->thorough)
        return v;
    pool = wl_open(q->path, q->domain, PMS_MODE_READ_WRITE, &e);
    if (!pool)
        return bad("third open", &e);
    bool same = wl_digest(pool) == after && pms_check(pool, &r, &e) == PMS_OK && sound(&r);
    pms_pool_release(pool);
    return same ? v : bad("the transaction after recovery was lost", NULL);
}

/* Damage: an error, or a store that can be walked, checked, written and closed. */
static struct verdict judge_hostile(const struct question *q)
{
    static struct pms_check_report r;
    struct pms_error e = {0};
    struct verdict v = {.ok = true};
    for (int mode = PMS_MODE_READ; mode <= PMS_MODE_READ_WRITE; mode++) {
        if (mode == PMS_MODE_READ && !q->thorough)
            continue;
        struct pms_pool *pool = wl_open(
            q->path, mode == PMS_MODE_READ ? PMS_DOMAIN_AUTO : q->domain, mode, &e);
        if (!pool)
            continue;
        v.digest = wl_digest(pool);
        pms_check(pool, &r, &e);
        if (mode == PMS_MODE_READ_WRITE)
            (void)transact(pool, &e);
        pms_pool_release(pool);
    }
    return v;
}

static void serve(struct shared *s, int in, int out)
{
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    while (read(in, &byte, 1) == 1) {
        s->v = s->q.hostile ? judge_hostile(&s->q) : judge_recovered(&s->q);
        if (write(out, &byte, 1) != 1)
            break;
    }
    leave(0);
}

/* ---- in the parent ---- */

struct oracle *oracle_new(void)
{
    struct oracle *o = calloc(1, sizeof *o);
    o->shared = mmap(NULL, sizeof *o->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                     -1, 0);
    return o;
}

static void start(struct oracle *o)
{
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC)) {
        perror("pipe");
        exit(2);
    }
    fflush(stdout);
    o->child = fork();
    if (o->child == 0) {
        close(to[1]);
        close(from[0]);
        int null = open("/dev/null", O_WRONLY);
        /* what a dying engine says goes into the verdict as the signal */
        dup2(null, STDERR_FILENO);
        serve(o->shared, to[0], from[1]);
    }
    close(to[0]);
    close(from[1]);
    o->to = to[1];
    o->from = from[0];
}

static void stop(struct oracle *o, int *status)
{
    close(o->to);
    close(o->from);
    waitpid(o->child, status, 0);
    o->child = 0;
}

struct verdict oracle_ask(struct oracle *o, const struct question *q)
{
    struct verdict v = {0};
    char byte = 1;
    int status;
    if (!o->child)
        start(o);
    o->shared->q = *q;
    struct pollfd p = {.fd = o->from, .events = POLLIN};
    bool asked = write(o->to, &byte, 1) == 1;
    int ready = asked ? poll(&p, 1, HANG_MS) : 1;
    while (ready < 0 && errno == EINTR) /* told to end early: not before this image is judged */
        ready = poll(&p, 1, HANG_MS);
    if (ready == 1 && read(o->from, &byte, 1) == 1)
        return o->shared->v;
    if (ready == 0) {
        kill(o->child, SIGKILL);
        snprintf(v.message, sizeof v.message, "opening or checking the image hangs");
        stop(o, &status);
        return v;
    }
    stop(o, &status);
    if (WIFSIGNALED(status))
        snprintf(v.message, sizeof v.message,
                 "the process that opened the image died of signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(v.message, sizeof v.message, "the process that opened the image ended with %d",
                 WEXITSTATUS(status));
    return v;
}

void oracle_free(struct oracle *o)
{
    int status;
    if (o->child)
        stop(o, &status);
    munmap(o->shared, sizeof *o->shared);
    free(o);
}
