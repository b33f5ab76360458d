/* Superblock, segments and session record: what lies outside transactions. All of it goes
 * through pwrite and fdatasync, which are coherent with every kind of mapping. */
#ifndef PMS_HEAP_SUPER_H
#define PMS_HEAP_SUPER_H

#include <stdbool.h>

#include "base/layout.h"
#include "seam/persist.h"
#include "base/status.h"

/* Fills super for a new file of about file_bytes. features: PMS_FEATURE_*. ERRORS: PMS_E_INVALID:
 * smaller than PMS_MIN_SIZE; PMS_E_OS: no randomness. */
int pms_super_plan(struct pms_superblock *super, uint64_t file_bytes, uint64_t max_bytes,
                   enum pms_domain domain, uint64_t features, struct pms_error *error);

/* Adds a segment of at least data_bytes of room behind the file's end. ERRORS: PMS_E_FULL:
 * max_bytes, or too many segments. */
int pms_super_plan_growth(struct pms_superblock *super, uint64_t data_bytes,
                          struct pms_error *error);

/* What has its space on the disk from the beginning, of segments from `first` on and of what is
 * before the first one, in order: all but their logs. Of those the first page alone has it, where
 * a reader looks for entries (on tmpfs that takes a page, and a full one ends the process): the
 * rest is backed as it is needed (seam/backing.h). Logs that are cut in halves have all of it.
 * Returns how many. */
struct pms_stretch {
    uint64_t off, bytes;
};
#define PMS_STRETCHES_MOST (PMS_MAX_SEGMENTS + 1)
uint32_t pms_super_stretches(const struct pms_superblock *super, uint32_t first,
                             struct pms_stretch *stretch);

/* Allocates these; all of the segments where the file system cannot allocate beside others'
 * writes. Returns errno. */
int pms_super_allocate(int fd, struct pms_persist *p, const struct pms_superblock *super,
                       uint32_t first);

/* Allocates them and writes their empty page tables. Nothing
 * refers to them yet.
 * ERRORS: PMS_E_FULL (the disk), PMS_E_OS; the file may be longer than before. */
int pms_super_format_segments(int fd, struct pms_persist *p, const struct pms_superblock *super,
                              uint32_t first, struct pms_error *error);

/* Everything a new file needs, the superblock last. ERRORS: as above. */
int pms_super_format(int fd, struct pms_persist *p, struct pms_superblock *super,
                     struct pms_error *error);

/* The valid copy with the higher generation, checked: segments in order, disjoint, inside the file.
 * ERRORS: PMS_E_NOT_A_STORE, PMS_E_VERSION, PMS_E_CORRUPT, PMS_E_OS. */
int pms_super_read(int fd, struct pms_superblock *super, struct pms_error *error);

/* Which copies are valid: bits 0 and 1. */
uint32_t pms_super_sound_copies(int fd);

/* Generation + 1, into the other copy, durable on return.  CRASH: the old or the new one holds. */
int pms_super_write(int fd, struct pms_persist *p, struct pms_superblock *super,
                    struct pms_error *error);

/* The same into both copies. Should the second one fail, that is told in *error alone:
 * the first is durable. */
int pms_super_write_both(int fd, struct pms_persist *p, struct pms_superblock *super,
                         struct pms_error *error);

/* Makes a file whose page tables and data are in place a store of its own: a new uuid, empty
 * logs, the superblock last. super: as it was; checked.  ERRORS: PMS_E_CORRUPT, PMS_E_VERSION,
 * PMS_E_OS. */
int pms_super_adopt(int fd, struct pms_persist *p, struct pms_superblock *super,
                    enum pms_domain domain, struct pms_error *error);
int pms_super_check(const struct pms_superblock *super, struct pms_error *error);

int pms_session_read(int fd, struct pms_session *session, struct pms_error *error);
/* Generation + 1, into the other copy, durable on return.  CRASH: the old or the new one holds. */
int pms_session_write(int fd, struct pms_persist *p, struct pms_session *session,
                      struct pms_error *error);
/* Into the copy that session->generation names; survives the process alone.
 * REQUIRES: the other copy is durable.  CRASH: the copy may be torn; then the other one holds. */
int pms_session_write_unsynced(int fd, struct pms_persist *p, struct pms_session *session,
                               struct pms_error *error);

/* What checksums of log entries and journal records start from. What is no longer in force in a
 * log is pre-images and images, the user's bytes, and those may be entries and records
 * themselves: of another store, of a copy of this one, or an enemy's. */
uint32_t pms_session_seed(const struct pms_session *session);

/* This run of the machine. Zeros where the system does not say. */
void pms_boot_id(uint8_t id[16]);

/* The anchor word of the byte-addressable domains. */
uint64_t pms_anchor_pack(uint64_t tx);
bool pms_anchor_unpack(uint64_t word, uint64_t *tx); /* false: its check bits are wrong */

#endif
