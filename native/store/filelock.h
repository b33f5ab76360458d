/* Which file is the store, and who may open it.
 *
 * The lock (flock) lives on a descriptor that is never mapped and that no fork child gets
 * (holder.h): a mapping or an inherited descriptor would keep a dead trainer's lock alive. */
#ifndef PMS_STORE_FILELOCK_H
#define PMS_STORE_FILELOCK_H

#include <stdbool.h>

struct pms_error;
struct pms_options;

struct pms_files {
    char *path;   /* real path; malloc'd */
    int fd;       /* data */
    int lock_fd;  /* the holder's */
    bool created; /* a new, unformatted file under temp_path: publish or discard it */
    char *temp_path;
    bool replaces;   /* publish replaces what is at path, */
    int old_lock_fd; /* whose lock is held until then */
};

/* Opens or creates as options->mode says, and holds the lock. ERRORS: PMS_E_LOCKED, PMS_E_OS
 * (errno tells: ENOENT, EEXIST, EACCES, EROFS, EISDIR, ...), PMS_E_NOT_A_STORE (empty, mode r or
 * r+), PMS_E_INVALID (not a regular file). */
int pms_files_open(struct pms_files *f, const char *path, const struct pms_options *options,
                   struct pms_error *error);

/* Gives a created and formatted file its name, durably. ERRORS: PMS_E_EXISTS when somebody else
 * was faster. */
int pms_files_publish(struct pms_files *f, struct pms_error *error);

/* That a file which was there has its name durably: who made it, or put it there (a compaction, a
 * restore), may have died or failed before that was so. */
int pms_files_confirm(struct pms_files *f, struct pms_error *error);

/* Whether somebody has it open for writing now: looked at by having the lock for a moment. */
bool pms_files_written(const struct pms_files *f);

void pms_files_close(struct pms_files *f); /* discards what was not published */

#endif
