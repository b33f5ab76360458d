
#include "store/filelock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/layout.h"
#include "base/process.h"
#include "commit/unlock.h"
#include "heap/super.h"
#include "seam/holder.h"
#include "store/open.h"

#define POLL_NS 5000000ll
#define LOOK_NS 100000000ll
#define CLOSED_NS 60000000000ll
#define TRIES 100 /* somebody swaps the file under us all the time: give up */

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1u
#endif

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* Whether who has the lock has closed the store, and only copies what its views show of it: it is
 * marked clean, and others may not even read. (Or it is about to open it: that takes no time.) */
static bool is_closed(int lock_fd, const char *path)
{
    struct pms_session session;
    if (pms_holder_lock(lock_fd, LOCK_SH) == 0) {
        (void)pms_holder_lock(lock_fd, LOCK_UN);
        return false;
    }
    int fd = pms_process_open(path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW, 0);
    bool clean = fd >= 0 && pms_session_read(fd, &session, NULL) == PMS_OK &&
                 session.state == PMS_SESSION_CLEAN;
    pms_process_close(fd);
    return clean;
}

/* Waits longer for who has closed the store, but not through a signal: its handler may raise. */
static int lock_within(int fd, int how, const char *path, int64_t timeout_ns,
                       struct pms_error *error)
{
    int64_t begun = now_ns();
    /* a reader that looks whether anybody writes has it for a moment */
    int64_t end = begun + (timeout_ns < LOOK_NS ? LOOK_NS : timeout_ns);
    while (pms_holder_lock(fd, how) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            return pms_fail_errno(error, "locking the store");
        bool late = timeout_ns >= 0 && now_ns() >= end, closed = late && is_closed(fd, path);
        if (late && (!closed || now_ns() >= begun + CLOSED_NS)) {
            if (pms_holder_lock(fd, how) == 0) /* given back since */
                return PMS_OK;
            return pms_fail(error, PMS_E_LOCKED,
                            closed ? "closed: arrays of it are still copied"
                                   : "the store is open in another process, or twice in this one");
        }
        struct timespec pause = {0, POLL_NS};
        pms_unlock_hurry(); /* it may be this process */
        if (nanosleep(&pause, NULL) != 0 && closed) {
            pms_fail(error, PMS_E_LOCKED, "interrupted");
            if (error)
                error->sys_errno = EINTR;
            return PMS_E_LOCKED;
        }
    }
    return PMS_OK;
}

static bool same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static bool same_file(int fd, const char *path)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && lstat(path, &b) == 0 && same(&a, &b);
}

/* The file that is locked still has the name. */
static bool lock_is_of(int lock_fd, const char *path)
{
    struct stat a, b;
    return pms_holder_stat(lock_fd, &a) == 0 && lstat(path, &b) == 0 && same(&a, &b);
}

/* ---- the path ---- */

/* Real path of a file that may not exist yet: its directory has to. */
static char *resolve(const char *path)
{
    char *real = realpath(path, NULL);
    if (real || errno != ENOENT)
        return real;
    const char *slash = strrchr(path, '/');
    const char *base = slash ? slash + 1 : path;
    if (!*base) {
        errno = EISDIR;
        return NULL;
    }
    char link[PATH_MAX];
    ssize_t n = readlink(path, link, sizeof link - 1);
    if (n > 0) { /* a symbolic link to a file that does not exist */
        errno = ENOENT;
        return NULL;
    }
    char dir[PATH_MAX];
    if (!slash)
        snprintf(dir, sizeof dir, ".");
    else
        snprintf(dir, sizeof dir, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    char *real_dir = realpath(dir, NULL);
    if (!real_dir)
        return NULL;
    size_t room = strlen(real_dir) + strlen(base) + 2;
    real = malloc(room);
    if (real)
        snprintf(real, room, "%s/%s", strcmp(real_dir, "/") == 0 ? "" : real_dir, base);
    free(real_dir);
    return real;
}

static int directory_fd(const char *path)
{
    char dir[PATH_MAX];
    const char *slash = strrchr(path, '/');
    snprintf(dir, sizeof dir, "%.*s", slash == path ? 1 : (int)(slash - path), path);
    int fd;
    do
        fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* ---- creating ---- */

/* Whether it is a name that try_create_temp makes for this store: .BASE.PID.SALT.new */
static bool is_temp_name(const char *name, const char *base)
{
    char prefix[NAME_MAX + 1];
    int n = snprintf(prefix, sizeof prefix, ".%.200s.", base);
    long pid;
    unsigned salt;
    int end = 0;
    return strncmp(name, prefix, (size_t)n) == 0 &&
           sscanf(name + n, "%ld.%8x.new%n", &pid, &salt, &end) == 2 && end > 0 &&
           name[n + end] == '\0' && pid > 0;
}

/* What a creator that died left: a file of its name, nobody's lock, and empty or a store (or not
 * yet one: zeros where its magic will be). */
static void remove_if_left(const char *path)
{
    char magic[8] = {0};
    static const char none[sizeof magic];
    struct stat st;
    int fd = pms_process_open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK, 0);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid() &&
        flock(fd, LOCK_EX | LOCK_NB) == 0 && same_file(fd, path)) {
        ssize_t n = pms_persist_read(fd, magic, sizeof magic, 0);
        if (n == 0 || (n == (ssize_t)sizeof magic && (memcmp(magic, PMS_MAGIC, sizeof magic) == 0 ||
                                                      memcmp(magic, none, sizeof none) == 0)))
            unlink(path);
    }
    pms_process_close(fd);
}

static void remove_leftovers(const struct pms_files *f)
{
    const char *slash = strrchr(f->path, '/');
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s", slash == f->path ? 1 : (int)(slash - f->path), f->path);
    DIR *dir = opendir(path);
    for (const struct dirent *entry; dir && (entry = readdir(dir));) {
        if (!is_temp_name(entry->d_name, slash + 1))
            continue;
        if (snprintf(path, sizeof path, "%.*s/%s", (int)(slash - f->path), f->path, entry->d_name) <
            (int)sizeof path)
            remove_if_left(path);
    }
    if (dir)
        closedir(dir);
}

/* A new file beside the path, locked before anybody can know its name: it becomes the store by
 * one rename. *retry: somebody who creates the same store found it before it was locked, and
 * removed it. */
static int try_create_temp(struct pms_files *f, mode_t mode, bool *retry, struct pms_error *error)
{
    uint32_t salt = 0;
    const char *slash = strrchr(f->path, '/');
    size_t room = strlen(f->path) + 64;
    if (getrandom(&salt, sizeof salt, 0) != sizeof salt)
        return pms_fail_errno(error, "reading randomness");
    f->temp_path = malloc(room);
    if (!f->temp_path)
        return pms_fail_errno(error, "allocating memory");
    snprintf(f->temp_path, room, "%.*s/.%.200s.%ld.%08x.new", (int)(slash - f->path), f->path,
             slash + 1, (long)getpid(), (unsigned)salt);
    f->fd = pms_process_open(f->temp_path, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (f->fd < 0) {
        free(f->temp_path);
        f->temp_path = NULL;
        return pms_fail_errno(error, "creating the store's file");
    }
    f->created = true;
    /* whatever the umask; some file systems have no permissions */
    (void)!fchmod(f->fd, mode ? mode & 0777 : 0600);
    f->lock_fd = pms_holder_open(f->temp_path, O_RDWR | O_NOFOLLOW);
    if (f->lock_fd < 0) {
        *retry = errno == ENOENT;
        return *retry ? PMS_OK : pms_fail_errno(error, "opening the new store");
    }
    /* held for a moment by who looks at it */
    int status = lock_within(f->lock_fd, LOCK_EX, f->temp_path, -1, error);
    *retry = status == PMS_OK && !lock_is_of(f->lock_fd, f->temp_path);
    return status;
}

static int create_temp(struct pms_files *f, mode_t mode, struct pms_error *error)
{
    bool retry = false;
    remove_leftovers(f);
    int status = try_create_temp(f, mode, &retry, error);
    for (int i = 0; retry && i < TRIES; i++) {
        pms_process_close(f->fd);
        pms_holder_close(f->lock_fd);
        free(f->temp_path);
        f->fd = f->lock_fd = -1;
        f->temp_path = NULL;
        f->created = false;
        status = try_create_temp(f, mode, &retry, error);
    }
    return status == PMS_OK && retry
               ? pms_fail(error, PMS_E_STATE,
                          "the new store's file is removed again and again by somebody else")
               : status;
}

static int rename_new(const char *from, const char *to)
{
    long r = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
    if (r == 0 || (errno != EINVAL && errno != ENOSYS))
        return (int)r;
    if (link(from, to) != 0) /* a file system without the flag */
        return -1;
    return unlink(from);
}

static int sync_directory(int dir, struct pms_error *error)
{
    int err;
    do
        err = fsync(dir) == 0 ? 0 : errno;
    while (err == EINTR);
    close(dir);
    errno = err == EINVAL ? 0 : err; /* some file systems have no directories to sync */
    return errno ? pms_fail_errno(error, "syncing the store's directory") : PMS_OK;
}

int pms_files_publish(struct pms_files *f, struct pms_error *error)
{
    if (!f->created)
        return PMS_OK;
    int r = f->replaces ? rename(f->temp_path, f->path) : rename_new(f->temp_path, f->path);
    if (r != 0 && errno == EEXIST)
        return pms_fail(error, PMS_E_EXISTS, "another process created the store at the same time");
    if (r != 0)
        return pms_fail_errno(error, "giving the new store its name");
    free(f->temp_path);
    f->temp_path = NULL;
    f->created = false;
    if (f->old_lock_fd >= 0)
        /* who waited for it finds that the path names another file now */
        pms_holder_close(f->old_lock_fd);
    f->old_lock_fd = -1;
    int dir = directory_fd(f->path);
    /* the name, before open returns */
    return dir < 0 ? pms_fail_errno(error, "opening the store's directory")
                   : sync_directory(dir, error);
}

int pms_files_confirm(struct pms_files *f, struct pms_error *error)
{
    int dir = directory_fd(f->path);
    return dir < 0 ? PMS_OK : sync_directory(dir, error); /* who may not read it made none there */
}

/* ---- opening ---- */

static int check_regular(const struct stat *st, struct pms_error *error)
{
    if (S_ISDIR(st->st_mode)) {
        errno = EISDIR;
        return pms_fail_errno(error, "opening the store");
    }
    /* devdax is one: it has no length, no directory to rename in, and no writes to format it
     * with */
    if (S_ISCHR(st->st_mode))
        return pms_fail(error, PMS_E_INVALID,
                        "a device, not a file: give persistent memory a DAX file system "
                        "(ndctl create-namespace --mode=fsdax, mount -o dax)");
    if (!S_ISREG(st->st_mode))
        return pms_fail(error, PMS_E_INVALID, "not a regular file");
    return PMS_OK;
}

/* Locks what is at the path and makes sure that it still is there. *retry: it was swapped
 * meanwhile. */
static int open_locked(struct pms_files *f, const struct pms_options *o, bool *retry,
                       struct pms_error *error)
{
    bool reading = o->mode == PMS_MODE_READ;
    /* links were followed when the path was resolved */
    int flags = (reading ? O_RDONLY : O_RDWR) | O_NONBLOCK | O_NOFOLLOW;
    struct stat locked, data;
    *retry = false;
    f->lock_fd = pms_holder_open(f->path, flags);
    if (f->lock_fd < 0)
        return pms_fail_errno(error, "opening the store");
    if (pms_holder_stat(f->lock_fd, &locked) != 0)
        return pms_fail_errno(error, "looking at the store's file");
    int status = check_regular(&locked, error);
    if (!status && !(reading && o->beside))
        status = lock_within(f->lock_fd, reading ? LOCK_SH : LOCK_EX, f->path, o->lock_timeout_ns,
                             error);
    if (status)
        return status;
    f->fd = pms_process_open(f->path, flags, 0);
    if (f->fd < 0 && errno != ENOENT)
        return pms_fail_errno(error, "opening the store");
    *retry = f->fd < 0 || !lock_is_of(f->lock_fd, f->path) || fstat(f->fd, &data) != 0 ||
             !same(&data, &locked);
    return PMS_OK;
}

/* An existing file that is to be replaced: its lock is held until the new one has its name. */
static int replace_locked(struct pms_files *f, mode_t mode, struct pms_error *error)
{
    pms_process_close(f->fd);
    f->old_lock_fd = f->lock_fd;
    f->fd = f->lock_fd = -1;
    f->replaces = true;
    return create_temp(f, mode, error);
}

static void drop(struct pms_files *f)
{
    pms_process_close(f->fd);
    pms_holder_close(f->lock_fd);
    pms_holder_close(f->old_lock_fd);
    f->fd = f->lock_fd = f->old_lock_fd = -1;
}

static int try_open(struct pms_files *f, const struct pms_options *o, bool *retry,
                    struct pms_error *error)
{
    struct stat st;
    bool there = stat(f->path, &st) == 0;
    *retry = false;
    if (!there && errno != ENOENT)
        return pms_fail_errno(error, "opening the store");
    if (!there && (o->mode == PMS_MODE_READ || o->mode == PMS_MODE_READ_WRITE))
        return pms_fail_errno(error, "opening the store");
    if (!there)
        return create_temp(f, 0, error);
    if (o->mode == PMS_MODE_EXCLUSIVE) {
        errno = EEXIST;
        return pms_fail_errno(error, "creating the store");
    }
    int status = open_locked(f, o, retry, error);
    if (status || *retry)
        return status;
    fstat(f->fd, &st);
    if (o->mode == PMS_MODE_TRUNCATE || (o->mode == PMS_MODE_APPEND && st.st_size == 0))
        return replace_locked(f, st.st_mode, error);
    if (st.st_size == 0)
        return pms_fail(error, PMS_E_NOT_A_STORE, "the file is empty");
    return PMS_OK;
}

int pms_files_open(struct pms_files *f, const char *path, const struct pms_options *options,
                   struct pms_error *error)
{
    *f = (struct pms_files){.fd = -1, .lock_fd = -1, .old_lock_fd = -1};
    f->path = resolve(path);
    if (!f->path)
        return pms_fail_errno(error, "finding the store");
    for (int i = 0; i < TRIES; i++) {
        bool retry;
        int status = try_open(f, options, &retry, error);
        if (status != PMS_OK || !retry)
            return status;
        drop(f);
    }
    return pms_fail(error, PMS_E_STATE,
                    "the store's file is replaced again and again by somebody else");
}

bool pms_files_written(const struct pms_files *f)
{
    if (pms_holder_lock(f->lock_fd, LOCK_SH) != 0)
        return true;
    (void)pms_holder_lock(f->lock_fd, LOCK_UN);
    return false;
}

void pms_files_close(struct pms_files *f)
{
    if (f->created && f->temp_path)
        unlink(f->temp_path);
    drop(f);
    free(f->temp_path);
    free(f->path);
    f->temp_path = f->path = NULL;
}
