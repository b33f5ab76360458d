/* What a store takes of the machine when it is opened: address space, memory that may be
 * written, space on the disk. */
#ifndef PMS_STORE_ROOM_H
#define PMS_STORE_ROOM_H

#include <stdint.h>

struct pms_error;
struct pms_pool;

/* Address space for growth: as far as the file can get, unless the process may not have that
 * much. */
uint64_t pms_room_address_space(const struct pms_pool *pool);

/* Whether all of a private view may be made writable under RLIMIT_DATA.  REQUIRES: mapped, all
 * pages protected, nobody knows the addresses yet.  ERRORS: PMS_E_OS. */
int pms_room_check_memory(const struct pms_pool *pool, struct pms_error *error);

/* Fills the file's holes with reserved space, but for the logs: a copy may have some, and a store
 * into one on a full disk is a SIGBUS.
 * ERRORS: PMS_E_FULL, PMS_E_OS.  CRASH: some are filled; no byte that can be read changes. */
int pms_room_fill_holes(struct pms_pool *pool, struct pms_error *error);

/* Domain file: the same for the journal's ring. (What the blocks need of the logs, the heap asks
 * for.) ERRORS: as above. */
int pms_room_back_logs(struct pms_pool *pool, struct pms_error *error);

#endif
