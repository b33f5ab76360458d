/* Records what a program does to the files below one directory: every system call that changes
 * them, and every store into a shared mapping of them, in the program's own order, byte for
 * byte. It traces (ptrace), so it does not matter who makes the calls: Python, a C++ stream,
 * Rust, a database. See crashtests/peers.py.
 *
 *     watch DIRECTORY RECORD same|other PROGRAM [ARGUMENT ...]
 *
 * Recording starts at the program's prctl(MARK_CALL, 0): what the directory holds then is taken
 * down as synced. Later marks go into the record. While a file is mapped shared, the program
 * runs an instruction at a time and the file is compared with a shadow. `other`: the program is
 * told another boot id than the machine's, as if a later reader came after a restart.
 *
 * The record is that of recorder.c, with more kinds. more = 1: the next event belongs to the
 * same instant. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/layout.h"

#ifndef __x86_64__
#error "the recorder knows the registers of x86-64 only"
#endif

#define MARK_CALL 0x706d73
/* instructions between looks at the whole of the mapped files; in between at the pages that
 * changed last */
#define GROUP 64u
#define HOT 8u
#define THREADS 256
#define FILES 16

enum kind {
    CREATE = 1,
    WRITE,
    SYNC,
    RENAME,
    LINK,
    UNLINK,
    MKDIR,
    SIZE,
    MARK,
    TRUNCATE,
    STORE,
    SYNC_RANGE
};
struct head {
    uint32_t kind, path, rest, more;
    uint64_t off;
};

struct thread {
    pid_t id;
    bool in_call, existed, ours;
    long nr;
    uint64_t arg[6];
    char path[PATH_MAX], other[PATH_MAX];
};
struct mapped {
    char path[PATH_MAX];
    int fd;
    unsigned char *now, *shadow;
    size_t bytes;
    bool seen;
};
struct pending {
    struct mapped *file;
    uint64_t off;
    uint32_t bytes;
    bool more;
    unsigned char *data;
};

static struct thread threads[THREADS];
static struct mapped files[FILES];
static struct {
    struct mapped *file;
    size_t page;
} hot[HOT];
static struct pending *pending;
static size_t pending_count, pending_room;
static unsigned next_hot, instructions;
static char root[PATH_MAX];
static size_t root_length;
static int out = -1;
static bool started, other_boot;
static uint64_t interpreter_from, interpreter_to;

static void fail(const char *format, ...)
{
    va_list a;
    va_start(a, format);
    fprintf(stderr, "watch: ");
    vfprintf(stderr, format, a);
    fprintf(stderr, "%s%s\n", errno ? ": " : "", errno ? strerror(errno) : "");
    va_end(a);
    exit(2);
}

static bool below_root(const char *path)
{
    return strncmp(path, root, root_length) == 0 &&
           (path[root_length] == '/' || path[root_length] == 0) && !strstr(path, " (deleted)");
}

/* ---- the record ---- */

static void put(const void *from, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        ssize_t n = write(out, (const char *)from + at, bytes - at);
        if (n <= 0)
            fail("writing the record");
        at += (size_t)n;
    }
}

static void record_part(enum kind kind, const char *path, const void *rest, size_t bytes,
                        uint64_t off, bool more)
{
    struct head h = {.kind = kind,
                     .path = (uint32_t)strlen(path),
                     .rest = (uint32_t)bytes,
                     .more = more,
                     .off = off};
    put(&h, sizeof h);
    put(path, h.path);
    put(rest, bytes);
}

static void record(enum kind kind, const char *path, const void *rest, size_t bytes, uint64_t off)
{
    record_part(kind, path, rest, bytes, off, false);
}

static int take_down(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)where;
    if (type == FTW_DP && strcmp(path, root) != 0)
        record(SYNC, path, NULL, 0, 0);
    if (type != FTW_F)
        return 0;
    record(CREATE, path, NULL, 0, 0);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *data = st->st_size ? mmap(NULL, (size_t)st->st_size, PROT_READ, MAP_SHARED, fd, 0) : NULL;
    if (fd < 0 || data == MAP_FAILED)
        fail("%s", path);
    record(WRITE, path, data, (size_t)st->st_size, 0);
    record(SYNC, path, NULL, 0, 0);
    if (data)
        munmap(data, (size_t)st->st_size);
    close(fd);
    return 0;
}

static int take_down_directory(const char *path, const struct stat *st, int type, struct FTW *where)
{
    (void)st;
    (void)where;
    if (type == FTW_D && strcmp(path, root) != 0)
        record(MKDIR, path, NULL, 0, 0);
    return 0;
}

/* ---- the program's memory and descriptors ---- */

static void memory(pid_t id, uint64_t address, void *to, size_t bytes, bool get)
{
    struct iovec mine = {to, bytes}, its = {(void *)address, bytes};
    ssize_t n = get ? process_vm_readv(id, &mine, 1, &its, 1, 0)
                    : process_vm_writev(id, &mine, 1, &its, 1, 0);
    if (n != (ssize_t)bytes)
        fail("%zu bytes of the program's memory at %lx", bytes, (unsigned long)address);
}

static void link_of(pid_t id, const char *what, char *path)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/%s", id, what);
    ssize_t n = readlink(name, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
}

static void path_of_fd(pid_t id, int fd, char *path)
{
    char what[32];
    snprintf(what, sizeof what, fd == AT_FDCWD ? "cwd" : "fd/%d", fd);
    link_of(id, what, path);
}

/* The string at address, relative to a directory of the program. */
static void path_at(pid_t id, int directory, uint64_t address, char *path)
{
    char name[PATH_MAX] = {0}, base[PATH_MAX] = {0};
    for (size_t n = 0; n < sizeof name - 1; n++) {
        memory(id, address + n, name + n, 1, true);
        if (!name[n])
            break;
    }
    if (*name != '/')
        path_of_fd(id, directory, base);
    if (snprintf(path, PATH_MAX, "%s%s%s", base, *name == '/' ? "" : "/", name) >= PATH_MAX)
        fail("a path is too long");
    for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--)
        path[n - 1] = 0;
}

static void fd_info(pid_t id, int fd, uint64_t *position, bool *synchronous)
{
    char name[64];
    unsigned flags = 0;
    snprintf(name, sizeof name, "/proc/%d/fdinfo/%d", id, fd);
    FILE *f = fopen(name, "re");
    if (!f || fscanf(f, "pos: %lu flags: %o", position, &flags) != 2)
        fail("%s", name);
    fclose(f);
    *synchronous = flags & O_DSYNC;
}

/* ---- stores into shared mappings ---- */

static void flush_pending(bool together)
{
    for (size_t i = 0; i < pending_count; i++) {
        struct pending *p = &pending[i];
        record_part(STORE, p->file->path, p->data, p->bytes, p->off,
                    i + 1 < pending_count && (together || p->more));
        free(p->data);
    }
    pending_count = 0;
}

static void changed(struct mapped *m, size_t from, size_t to)
{
    if (pending_count == pending_room) {
        pending_room = pending_room ? pending_room * 2 : 64;
        pending = realloc(pending, pending_room * sizeof *pending);
    }
    struct pending *p = pending ? &pending[pending_count++] : NULL;
    if (!p || !(p->data = malloc(to - from)))
        fail("memory");
    p->file = m;
    p->off = from;
    p->bytes = (uint32_t)(to - from);
    p->more = true;
    /* threads run an instruction at a time: a racing one shows in the next look */
    memcpy(p->data, m->now + from, to - from);
    memcpy(m->shadow + from, p->data, to - from);
}

static bool look_at_page(struct mapped *m, size_t page)
{
    size_t at = page * PMS_PAGE, end = at + PMS_PAGE < m->bytes ? at + PMS_PAGE : m->bytes;
    if (at >= m->bytes || memcmp(m->now + at, m->shadow + at, end - at) == 0)
        return false;
    for (size_t i = at; i < end; i++) {
        if (m->now[i] == m->shadow[i])
            continue;
        size_t last = i;
        for (size_t k = i; k < end && k < last + 64; k++)
            if (m->now[k] != m->shadow[k])
                last = k;
        changed(m, i, last + 1);
        i = last;
    }
    return true;
}

/* What one look finds happened in one instant: it is one instruction's, or that of several in
 * pages that nobody looked at. */
static void look(bool everywhere)
{
    size_t before = pending_count;
    bool elsewhere = false;
    for (unsigned i = 0; i < HOT; i++)
        if (hot[i].file)
            look_at_page(hot[i].file, hot[i].page);
    for (struct mapped *m = files; everywhere && m < files + FILES; m++)
        for (size_t page = 0; m->now && page * PMS_PAGE < m->bytes; page++)
            if (look_at_page(m, page)) {
                elsewhere = true;
                hot[next_hot % HOT].file = m;
                hot[next_hot++ % HOT].page = page;
            }
    if (pending_count > before)
        pending[pending_count - 1].more = false;
    if (everywhere)
        flush_pending(elsewhere && instructions > 1);
    if (everywhere)
        instructions = 0;
}

static struct mapped *mapped_at(const char *path)
{
    for (struct mapped *m = files; m < files + FILES; m++)
        if (m->now && strcmp(m->path, path) == 0)
            return m;
    return NULL;
}

static void drop(struct mapped *m)
{
    for (unsigned i = 0; i < HOT; i++)
        if (hot[i].file == m)
            hot[i].file = NULL;
    munmap(m->now, m->bytes);
    free(m->shadow);
    close(m->fd);
    *m = (struct mapped){0};
}

/* Follows the size of the file: what is new is zero. */
static void resize(struct mapped *m)
{
    struct stat st;
    if (fstat(m->fd, &st) != 0 || st.st_size == 0)
        fail("%s: its size", m->path);
    size_t bytes = (size_t)st.st_size;
    if (bytes == m->bytes)
        return;
    if (m->now)
        munmap(m->now, m->bytes);
    m->now = mmap(NULL, bytes, PROT_READ, MAP_SHARED, m->fd, 0);
    m->shadow = realloc(m->shadow, bytes);
    if (m->now == MAP_FAILED || !m->shadow)
        fail("%s", m->path);
    if (bytes > m->bytes)
        memset(m->shadow + m->bytes, 0, bytes - m->bytes);
    m->bytes = bytes;
}

static void take(struct mapped *m, const char *path)
{
    snprintf(m->path, sizeof m->path, "%s", path);
    m->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (m->fd < 0)
        fail("%s", path);
    resize(m);
    memcpy(m->shadow, m->now, m->bytes);
}

struct area {
    uint64_t from, to, offset;
    char path[PATH_MAX];
    bool shared;
};

static bool next_area(FILE *maps, struct area *a)
{
    char line[PATH_MAX + 200], may[8];
    while (fgets(line, sizeof line, maps)) {
        int name = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %n", &a->from, &a->to, may, &a->offset, &name) <
                4 ||
            !name || !below_root(line + name))
            continue;
        snprintf(a->path, sizeof a->path, "%s", line + name);
        a->shared = may[3] == 's';
        return true;
    }
    return false;
}

static FILE *maps_of(pid_t id)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/maps", id);
    FILE *f = fopen(name, "re");
    if (!f)
        fail("%s", name);
    return f;
}

/* The interpreter's own code stores into no mapped file: it is run from branch to branch. */
static void find_interpreter(pid_t id)
{
    char exe[PATH_MAX], line[PATH_MAX + 200];
    uint64_t from, to;
    link_of(id, "exe", exe);
    FILE *maps = maps_of(id);
    while (fgets(line, sizeof line, maps)) {
        line[strcspn(line, "\n")] = 0;
        const char *name = strchr(line, '/');
        if (name && (strcmp(name, exe) == 0 || strstr(name, "/libpython")) &&
            strstr(line, " r-xp ") && sscanf(line, "%lx-%lx", &from, &to) == 2 &&
            to - from > interpreter_to - interpreter_from) {
            interpreter_from = from;
            interpreter_to = to;
        }
    }
    fclose(maps);
}

static void find_mapped(pid_t id)
{
    struct area a;
    FILE *maps = maps_of(id);
    for (struct mapped *m = files; m < files + FILES; m++)
        m->seen = false;
    while (next_area(maps, &a)) {
        struct mapped *m = mapped_at(a.path), *free_one = files;
        if (!a.shared)
            continue;
        while (!m && free_one < files + FILES && free_one->now)
            free_one++;
        if (!m && free_one == files + FILES)
            fail("too many mapped files");
        if (!m)
            take(m = free_one, a.path);
        m->seen = true;
    }
    fclose(maps);
    for (struct mapped *m = files; m < files + FILES; m++)
        if (m->now && !m->seen)
            drop(m);
}

static bool any_mapped(void)
{
    for (struct mapped *m = files; m < files + FILES; m++)
        if (m->now)
            return true;
    return false;
}

/* ---- system calls ---- */

static void begin(void)
{
    if (nftw(root, take_down_directory, 16, FTW_PHYS) != 0 ||
        nftw(root, take_down, 16, FTW_PHYS | FTW_DEPTH) != 0)
        fail("%s", root);
    record(SYNC, root, NULL, 0, 0);
    started = true;
}

/* Notes what will be gone afterwards. */
static void enter(struct thread *t)
{
    const uint64_t *a = t->arg;
    t->ours = false;
    t->path[0] = t->other[0] = 0;
    switch (t->nr) {
    case SYS_open:
    case SYS_creat:
    case SYS_unlink:
    case SYS_rmdir:
    case SYS_mkdir:
    case SYS_truncate:
    case SYS_symlink: path_at(t->id, AT_FDCWD, t->nr == SYS_symlink ? a[1] : a[0], t->path); break;
    case SYS_openat:
    case SYS_unlinkat:
    case SYS_mkdirat: path_at(t->id, (int)a[0], a[1], t->path); break;
    case SYS_rename:
    case SYS_link:
        path_at(t->id, AT_FDCWD, a[0], t->path);
        path_at(t->id, AT_FDCWD, a[1], t->other);
        break;
    case SYS_renameat:
    case SYS_renameat2:
    case SYS_linkat:
        path_at(t->id, (int)a[0], a[1], t->path);
        path_at(t->id, (int)a[2], a[3], t->other);
        break;
    case SYS_write:
    case SYS_writev:
    case SYS_pwrite64:
    case SYS_pwritev:
    case SYS_pwritev2:
    case SYS_ftruncate:
    case SYS_fallocate:
    case SYS_fsync:
    case SYS_fdatasync:
    case SYS_sendfile: path_of_fd(t->id, (int)a[0], t->path); break;
    case SYS_copy_file_range:
    case SYS_splice: path_of_fd(t->id, (int)a[2], t->path); break;
    case SYS_mmap:
        if (a[3] & MAP_SHARED && !(a[3] & MAP_ANONYMOUS))
            path_of_fd(t->id, (int)a[4], t->path);
        break;
    case SYS_munmap:
    case SYS_mremap: t->ours = any_mapped(); return;
    case SYS_msync: {
        struct area area;
        FILE *maps = maps_of(t->id);
        while (next_area(maps, &area))
            if (area.from <= a[0] && a[0] < area.to) {
                snprintf(t->path, sizeof t->path, "%s", area.path);
                t->arg[3] = a[0] - area.from + area.offset;
            }
        fclose(maps);
        break;
    }
    default: return;
    }
    t->ours = below_root(t->path) || below_root(t->other);
    t->existed = t->ours && access(t->path, F_OK) == 0;
    if (t->ours)
        look(true); /* all stores so far come before it */
}

static void wrote(struct thread *t, struct mapped *m, uint64_t bytes)
{
    uint64_t off = t->arg[3], left = bytes, at = 0;
    bool synchronous;
    uint64_t position;
    unsigned char *data = malloc(bytes + 1);
    fd_info(t->id, (int)t->arg[0], &position, &synchronous);
    if (t->nr == SYS_write || t->nr == SYS_writev ||
        ((t->nr == SYS_pwritev2) && (int64_t)off == -1))
        off = position - bytes;
    if (t->nr == SYS_write || t->nr == SYS_pwrite64) {
        memory(t->id, t->arg[1], data, bytes, true);
    } else {
        for (uint64_t i = 0; left && i < t->arg[2]; i++) {
            struct iovec v;
            memory(t->id, t->arg[1] + i * sizeof v, &v, sizeof v, true);
            size_t n = v.iov_len < left ? v.iov_len : left;
            memory(t->id, (uint64_t)v.iov_base, data + at, n, true);
            at += n;
            left -= n;
        }
    }
    record(WRITE, t->path, data, bytes, off);
    if (m) {
        resize(m);
        memcpy(m->shadow + off, data, bytes);
    }
    if (synchronous || (t->nr == SYS_pwritev2 && t->arg[5] & 6)) /* RWF_DSYNC, RWF_SYNC */
        record(SYNC_RANGE, t->path, &bytes, sizeof bytes, off);
    free(data);
}

static void leave(struct thread *t, int64_t result)
{
    const uint64_t *a = t->arg;
    uint64_t length = a[1];
    struct mapped *m = mapped_at(t->path);
    if (result < 0 && result > -4096)
        return;
    switch (t->nr) {
    case SYS_open:
    case SYS_openat:
    case SYS_creat: {
        uint64_t flags = t->nr == SYS_open     ? a[1]
                         : t->nr == SYS_openat ? a[2]
                                               : O_CREAT | O_TRUNC | O_WRONLY;
        if ((flags & O_TMPFILE) == O_TMPFILE)
            fail("a file without a name");
        if (flags & O_CREAT && !t->existed)
            record(CREATE, t->path, NULL, 0, 0);
        else if (flags & O_TRUNC)
            record(TRUNCATE, t->path, NULL, 0, 0);
        break;
    }
    case SYS_write:
    case SYS_writev:
    case SYS_pwrite64:
    case SYS_pwritev:
    case SYS_pwritev2: wrote(t, m, (uint64_t)result); break;
    case SYS_truncate:
    case SYS_ftruncate: record(TRUNCATE, t->path, NULL, 0, a[1]); break;
    case SYS_fallocate:
        if (a[1] & ~(uint64_t)FALLOC_FL_KEEP_SIZE)
            fail("fallocate with mode %lx", (unsigned long)a[1]);
        if (!a[1])
            record(SIZE, t->path, NULL, 0, a[2] + a[3]);
        break;
    case SYS_fsync:
    case SYS_fdatasync: record(SYNC, t->path, NULL, 0, 0); break;
    case SYS_msync:
        if (a[2] & MS_SYNC)
            record(SYNC_RANGE, t->path, &length, sizeof length, a[3]);
        break;
    case SYS_rename:
    case SYS_renameat:
    case SYS_renameat2:
        if (t->nr == SYS_renameat2 && a[4])
            fail("renameat2 with flags");
        record(RENAME, t->path, t->other, strlen(t->other), 0);
        break;
    case SYS_link:
    case SYS_linkat: record(LINK, t->path, t->other, strlen(t->other), 0); break;
    case SYS_unlink:
    case SYS_unlinkat:
    case SYS_rmdir: record(UNLINK, t->path, NULL, 0, 0); break;
    case SYS_mkdir:
    case SYS_mkdirat: record(MKDIR, t->path, NULL, 0, 0); break;
    case SYS_mmap:
    case SYS_munmap:
    case SYS_mremap: find_mapped(t->id); return;
    default: errno = 0; fail("system call %ld changes %s: not modelled", t->nr, t->path);
    }
    if (m)
        resize(m);
}

static void hide_boot_id(struct thread *t, int64_t result)
{
    char path[PATH_MAX], first;
    if (!other_boot || t->nr != SYS_read || result <= 0)
        return;
    path_of_fd(t->id, (int)t->arg[0], path);
    if (strcmp(path, "/proc/sys/kernel/random/boot_id") != 0)
        return;
    memory(t->id, t->arg[1], &first, 1, true);
    first = first == '0' ? '1' : '0';
    memory(t->id, t->arg[1], &first, 1, false);
}

static void system_call(struct thread *t)
{
    struct __ptrace_syscall_info info;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, t->id, sizeof info, &info) <= 0)
        fail("PTRACE_GET_SYSCALL_INFO");
    if (info.op == PTRACE_SYSCALL_INFO_ENTRY) {
        t->in_call = true;
        t->nr = (long)info.entry.nr;
        for (int i = 0; i < 6; i++)
            t->arg[i] = info.entry.args[i];
        if (t->nr == SYS_prctl && t->arg[0] == MARK_CALL) {
            if (t->arg[1] == 0) {
                begin();
                find_interpreter(t->id);
                find_mapped(t->id);
            } else if (started) {
                look(true);
                record(MARK, "", NULL, 0, t->arg[1]);
            }
        }
        if (started)
            enter(t);
    } else {
        t->in_call = false;
        if (started && t->ours)
            leave(t, info.exit.rval);
        t->ours = false;
        hide_boot_id(t, info.exit.rval);
    }
}

/* ---- the loop ---- */

static void resume(const struct thread *t, int signal)
{
    enum __ptrace_request how = PTRACE_SYSCALL;
    if (started && !t->in_call && any_mapped()) {
        errno = 0;
        uint64_t ip = (uint64_t)ptrace(PTRACE_PEEKUSER, t->id,
                                       offsetof(struct user_regs_struct, rip), 0);
        if (errno == 0 && ip - interpreter_from < interpreter_to - interpreter_from)
            how = PTRACE_SINGLEBLOCK;
        /* the instruction syscall: stop before and after it */
        else if (signal || (ptrace(PTRACE_PEEKTEXT, t->id, ip, 0) & 0xffff) != 0x050f)
            how = PTRACE_SINGLESTEP;
    }
    ptrace(how, t->id, 0, signal); /* ESRCH: it was killed; that is said to waitpid */
}

static struct thread *thread_of(pid_t id, bool *is_new)
{
    struct thread *free_one = NULL;
    *is_new = false;
    for (struct thread *t = threads; t < threads + THREADS; t++) {
        if (t->id == id)
            return t;
        if (!t->id && !free_one)
            free_one = t;
    }
    if (!free_one)
        fail("too many threads");
    *is_new = true;
    free_one->id = id;
    free_one->in_call = free_one->ours = false;
    return free_one;
}

static void stopped(struct thread *t, int status, bool is_new)
{
    int signal = WSTOPSIG(status);
    if (signal == (SIGTRAP | 0x80)) {
        system_call(t);
        signal = 0;
    } else if (status >> 16 || (is_new && signal == SIGSTOP)) {
        signal = 0; /* a new thread, an exec */
    } else if (signal == SIGTRAP) {
        if (started && any_mapped()) {
            instructions++;
            look(instructions >= GROUP);
        }
        signal = 0;
    }
    resume(t, signal);
}

int main(int argc, char **argv)
{
    if (argc < 5)
        fail("usage: watch DIRECTORY RECORD same|other PROGRAM [ARGUMENT ...]");
    if (!realpath(argv[1], root))
        fail("%s", argv[1]);
    root_length = strlen(root);
    other_boot = strcmp(argv[3], "other") == 0;
    out = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (out < 0)
        fail("%s", argv[2]);
    pid_t child = fork();
    if (child == 0) {
        if (ptrace(PTRACE_TRACEME, 0, 0, 0) != 0)
            _exit(125);
        raise(SIGSTOP);
        execvp(argv[4], argv + 4);
        _exit(127);
    }
    int status;
    bool is_new;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        fail("ptrace is not allowed here");
    long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK |
                   PTRACE_O_TRACEVFORK | PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL;
    if (ptrace(PTRACE_SETOPTIONS, child, 0, options) != 0)
        fail("PTRACE_SETOPTIONS");
    resume(thread_of(child, &is_new), 0);
    for (pid_t only = -1;;) {
        pid_t id = waitpid(only, &status, __WALL);
        if (id < 0)
            fail("waitpid");
        struct thread *t = thread_of(id, &is_new);
        only = -1;
        if (WIFSTOPPED(status)) {
            stopped(t, status, is_new);
            if (t->in_call && t->ours)
                /* calls that change files take turns, so that a sync covers what was written
                 * before it and no more */
                only = id;
            continue;
        }
        t->id = 0;
        if (id != child)
            continue;
        if (WIFSIGNALED(status))
            fail("the program died of signal %d", WTERMSIG(status));
        return WEXITSTATUS(status);
    }
}
