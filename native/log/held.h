/* The record of the held version: a transaction that was committed, and whose log is kept whole,
 * so that what it overwrote can still be had back. Byte-addressable domains.
 *
 * Each commit of a store that holds writes one, before the fence that all of the transaction's
 * data needs (F2): so it counts when the anchor does, and costs no fence. That of the other parity
 * is the one before. From the moment the next transaction's first entries overwrite its log it is
 * over, whatever of them reaches the medium: it counts its entries. */
#ifndef PMS_LOG_HELD_H
#define PMS_LOG_HELD_H

#include "log/undo.h"

/* Stores the record of transaction tag; not fenced. entries: of its log, final. REQUIRES: the log
 * lock; the log is cut in halves. */
void pms_held_write(struct pms_undo *u, uint64_t tag, uint64_t entries, enum pms_held_for held);

/* What is held while the last finished transaction is `last`, if anything. Everything is looked
 * at: each entry, with its checksum. */
bool pms_held_find(const struct pms_undo *u, uint64_t last, struct pms_held *held);

#endif
