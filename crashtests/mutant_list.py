"""What is broken in each mutant. `old` is in the file exactly once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    breaks: str
    domains: tuple[str, ...] = ("emulated",)
    equivalent: str = ""
    """Why nothing can tell it from the engine; empty: it must be killed."""
    first: tuple[str, ...] = ()
    """Workloads to try before all others."""
    native: tuple[str, ...] = ()
    """Tests of native/tests to try before these: of what no crash test can reach."""


FILE = ("file",)
BOTH = ("emulated", "file")

_UNDO = [
    Mutant("no_f1", "undo.c", "    pms_persist_fence(u->log_persist); /* F1", "    /* F1", "no fence after undo entries (I2)"),
    Mutant("entry_not_flushed", "undo.c", "    pms_persist_copy(p, dst, &line, sizeof line);",
           "    pms_persist_store(p, dst, &line, sizeof line);", "an entry's header is stored, never written back"),
    Mutant("image_not_flushed", "undo.c", "line.head.crc = pms_persist_copy_crc(p, dst + PMS_LINE, src, e->len, crc, steady);",
           "(void)steady; line.head.crc = pms_crc32c(crc, src, e->len); pms_persist_store(p, dst + PMS_LINE, src, e->len);",
           "a long pre-image is never written back"),
    Mutant("image_left_out", "undo.c", "line.head.crc = pms_persist_copy_crc(p, dst + PMS_LINE, src, e->len, crc, steady);",
           "line.head.crc = pms_crc32c(crc, src, e->len);", "a long pre-image is not copied at all"),
    Mutant("image_zeroed", "undo.c", "        pms_quiet_copy(line.image, src, e->len);", "        (void)src;",
           "a short pre-image is zeros"),
    Mutant("crc_not_checked", "undo.c", "    return pms_crc32c(crc, p + image_offset(out->len), out->len) == out->crc;",
           "    (void)crc; (void)p; return true;", "a torn entry counts"),
    Mutant("crc_without_image", "undo.c", "    return pms_crc32c(crc, p + image_offset(out->len), out->len) == out->crc;",
           "    (void)p; (void)pms_crc32c; return crc != 0 || out->crc;", "an entry's checksum is not compared with its image"),
    Mutant("tag_not_checked", "undo.c", "out->tag != tag || out->seq != seq", "out->seq != seq",
           "entries of another transaction count (I1)"),
    Mutant("seq_not_checked", "undo.c", "out->tag != tag || out->seq != seq", "out->tag != tag || (seq == 99999999)",
           "entries count in any order (I1)",
           equivalent="places in the log are taken in order of seq and never twice under one tag, so a valid entry of the tag is the next"),
    Mutant("scan_first_extent", "undo.c", "    for (uint32_t i = 0; i < u->extent_count; i++) {\n        struct pms_log_extent x",
           "    for (uint32_t i = 0; i < 1; i++) {\n        struct pms_log_extent x", "only the fast log is read at recovery"),
    Mutant("apply_oldest_first", "undo.c", "for (uint64_t i = a->count; i-- > 0;)", "for (uint64_t i = 0; i < a->count; i++)",
           "pre-images go back oldest first: of a page captured after the engine had stored into it, the later one stays", first=("scattered",)),
    Mutant("apply_skips_newest", "undo.c", "for (uint64_t i = a->count; i-- > 0;)", "for (uint64_t i = a->count - 1; i-- > 0;)",
           "the newest pre-image is not put back"),
    Mutant("apply_skips_oldest", "undo.c", "for (uint64_t i = a->count; i-- > 0;)", "for (uint64_t i = a->count; i-- > 1;)",
           "the oldest pre-image is not put back"),
    Mutant("apply_not_flushed", "undo.c", "pms_persist_copy(u->persist, dst_base + a->entry[i].target",
           "pms_persist_store(u->persist, dst_base + a->entry[i].target", "pre-images go back without write-back"),
    Mutant("store_uncaptured", "undo.c", "    for (uint32_t i = 0; i < count; i++)\n        pms_undo_prepare_locked(", "    for (uint32_t i = count; i < count; i++)\n        pms_undo_prepare_locked(",
           "what the engine stores has no pre-image (I3)", BOTH),
    Mutant("last_store_uncaptured", "undo.c", "    for (uint32_t i = 0; i < count; i++)\n        pms_undo_prepare_locked(",
           "    for (uint32_t i = 0; i == 0 || i + 1 < count; i++)\n        pms_undo_prepare_locked(",
           "the last of several ranges that the engine stores has no pre-image (I3)", BOTH),
    Mutant("store_before_entry", "undo.c", "    pms_undo_lock(u);\n    for (uint32_t i = 0; i < count; i++)\n        pms_undo_prepare_locked(",
           "    pms_undo_lock(u);\n    store_locked(u, s[0].off, s[0].src, s[0].len);\n    for (uint32_t i = 0; i < count; i++)\n        pms_undo_prepare_locked(",
           "the first of several ranges is stored before its pre-image is taken", BOTH),
    Mutant("store_unfenced", "undo.c", "    pms_undo_fence_locked(u); /* F1: the entries of all ranges", "    u->unfenced = false; /* F1: the entries of all ranges",
           "what the engine stores is stored before its entries are durable (I2)"),
    Mutant("entry_without_note", "undo.c", "        pms_undo_note(u, PMS_DIRTY_ENGINE, first * PMS_GRANULE, (g - first) * PMS_GRANULE, 0);",
           "", "what the engine stored is not on the list of what commit writes back", BOTH),
    Mutant("granule_always_set", "undo.c", "        if (granule_prepared(u, g)) {", "        if (granule_prepared(u, g) || g % 7 == 3) {",
           "one granule in seven is never captured"),
    Mutant("born_store_not_flushed", "undo.c", "    if (any_born(u, off, len))", "    if (false && any_born(u, off, len))",
           "a store into a block born in the transaction is never written back"),
    Mutant("born_not_flushed", "undo.c", "        pms_persist_copy(&own, pms_map_at(u->map, off), src, len);",
           "        pms_persist_store(u->persist, pms_map_at(u->map, off), src, len);", "a born block's content is never written back"),
    Mutant("fresh_not_noted", "undo.c", "        pms_undo_note(u, PMS_DIRTY_FRESH, off, len, 0);", "",
           "fresh pages are not on the list of what commit writes back", BOTH),
    Mutant("one_fast_log", "undo.c", "    u->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag & 1), PMS_FASTLOG_BYTES};",
           "    u->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag & 0), PMS_FASTLOG_BYTES};",
           "the next transaction's entries overwrite the log of one that is not finished"),
    Mutant("one_fast_log_everywhere", "undo.c", "    u->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag & 1), PMS_FASTLOG_BYTES};",
           "    u->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag / 2 & 1), PMS_FASTLOG_BYTES};",
           "entries are written to another fast log than they are read from"),
    Mutant("split_entry_shifted", "undo.c", "            n = (room - PMS_LINE) & ~(uint64_t)(PMS_PAGE - 1);",
           "            n = room - PMS_LINE;", "an entry at an extent's end is not cut at a page",
           equivalent="the entry still fits the extent; cutting at pages only keeps copies aligned"),
]  # fmt: skip

_TX = [
    Mutant("no_f2", "tx.c", "    pms_persist_fence(&pool->persist); /* F2", "    /* F2", "the anchor is stored before the data is durable"),
    Mutant("no_f3", "tx.c", "    pms_persist_fence(&pool->persist); /* F3: the anchor, before commit returns", "    /* F3",
           "commit returns before the anchor is durable"),
    Mutant("no_write_back", "tx.c", "    write_back(pool);\n", "", "nothing is written back at commit"),
    Mutant("no_write_back_user", "tx.c", "        if (d->kind == PMS_DIRTY_BORN) /* copied", "        if (d->kind == PMS_DIRTY_BORN || d->kind != PMS_DIRTY_ENGINE) /* copied",
           "the user's pages are not written back at commit"),
    Mutant("no_write_back_engine", "tx.c", "        if (d->kind == PMS_DIRTY_BORN) /* copied", "        if (d->kind == PMS_DIRTY_BORN || d->kind == PMS_DIRTY_ENGINE) /* copied",
           "the engine's stores are not written back at commit"),
    Mutant("no_write_back_hot", "tx.c", "        if (d->kind == PMS_DIRTY_BORN) /* copied", "        if (d->kind == PMS_DIRTY_BORN || d->kind == PMS_DIRTY_HOT) /* copied",
           "hot pages are not written back at commit"),
    Mutant("no_write_back_fresh", "tx.c", "        if (d->kind == PMS_DIRTY_BORN) /* copied", "        if (d->kind == PMS_DIRTY_BORN || d->kind == PMS_DIRTY_FRESH) /* copied",
           "fresh pages are not written back at commit"),
    Mutant("begun_takes_all", "tx.c", "            pool->begun = captured;", "            pool->begun = captured, pool->begun = pool->undo.dirty_count;",
           "what others stored while a landing waited that then failed is not pending", native=("test_landing",)),
    Mutant("write_back_short", "tx.c", "pms_persist_flush(&pool->persist, view + d->off, d->len);",
           "pms_persist_flush(&pool->persist, view + d->off, d->len - (d->len > 64 ? 64 : 0));", "the last line of each range is not written back"),
    Mutant("large_unfenced", "tx.c", "    pms_persist_fence(&own); /* F2 of this core", "    /* F2 of this core",
           "what other cores write back of a large range is not fenced by them", native=("test_durable",)),  # no workload writes 4 MiB at once
    Mutant("large_short", "tx.c", "(bytes + PIECE_BYTES - 1) / PIECE_BYTES);", "bytes / PIECE_BYTES - 1);",
           "the last piece of a large range is not written back", native=("test_durable",)),
    Mutant("write_back_first", "tx.c", "    int status = settle(pool, landing, &ahead, error);\n    if (status != PMS_OK)\n        return status;\n    write_back(pool);\n",
           "    write_back(pool);\n    int status = settle(pool, landing, &ahead, error);\n    if (status != PMS_OK)\n        return status;\n",
           "data is written back before the number of commits is stored"),
    Mutant("anchor_not_flushed", "tx.c", "    pms_persist_flush(&pool->persist, pms_map_at(&pool->map, PMS_OFF_ANCHOR), sizeof(uint64_t));\n}",
           "}", "the anchor is never written back"),
    Mutant("anchor_first", "tx.c", "    pms_persist_fence(&pool->persist); /* F2: all data of the transaction, before the anchor that makes it the state */\n    finish(pool);",
           "    finish(pool);\n    pms_persist_fence(&pool->persist);", "the anchor and F2 change places"),
    Mutant("epoch_not_counted", "tx.c", "pms_pool_root(pool)->epoch + by;", "pms_pool_root(pool)->epoch + by * (pool->tx % 3 != 1);",
           "some commits are not counted", native=("test_pool",)),  # wrong from the start: no crash is needed to see it
    Mutant("root_not_captured", "tx.c", "    pms_undo_prepare_locked(u, PMS_OFF_ROOT, PMS_GRANULE);\n", "", "the root's pre-image is not captured ahead", BOTH),
    Mutant("again_not_captured", "tx.c", "        pms_undo_prepare_locked(u, a->again[i].off, a->again[i].len);", "        (void)u;",
           "what is likely to be stored to again is not captured ahead",
           equivalent="capturing ahead saves a fence; without it the first store captures"),
    Mutant("hot_not_captured", "tx.c", "    pms_capture_hot(&pool->capture, a->hot, a->hot_count);", "    (void)a;",
           "hot pages stay writable and are not captured ahead"),
    Mutant("ahead_before_anchor", "tx.c", "    finish(pool);\n    /* The next transaction's first entries go to the other fast log: this transaction's log stays whole until F3. */\n    capture_ahead(pool, pool->tx + 1, &ahead);",
           "    pool->tx++;\n    capture_ahead(pool, pool->tx + 1, &ahead);\n    pool->undo.tag--;\n    finish(pool);\n    pool->undo.tag++;",
           "what is captured ahead is stored before the anchor",
           equivalent="both lie between F2 and F3, where their order is open; recovery never uses the tag again"),
    Mutant("rollback_no_fence", "tx.c", "    pms_persist_fence(&pool->persist); /* all pre-images back home", "    /* all",
           "the anchor gives the log up before the pre-images are home"),
    Mutant("rollback_no_f3", "tx.c", "    pms_persist_fence(&pool->persist); /* F3: the anchor, before the log of this", "    /* F3",
           "roll back returns before its anchor is durable",
           equivalent="the pre-images are home before (the fence above), so repeating a part of the roll back changes nothing; and the next "
           "transaction stores to nothing before a fence of its own, which makes the anchor durable too"),
    Mutant("rollback_no_anchor", "tx.c", "before the anchor gives their log up */\n    finish(pool);", "*/\n    pool->tx = pool->undo.tag;",
           "roll back does not move the anchor"),
    Mutant("file_runs_short", "tx.c", "            .pages = (uint32_t)(end - first),", "            .pages = (uint32_t)(end - first > 1 ? end - first - 1 : 1),",
           "the last page of each range is not in the record", FILE),
    Mutant("file_home_always", "tx.c", ".home = d->kind == PMS_DIRTY_FRESH && whole && end - first >= STRAIGHT_HOME_PAGES,",
           ".home = whole && end - first >= STRAIGHT_HOME_PAGES,", "pages live at the last commit are written straight home (I3)", FILE),
]  # fmt: skip

_LOCKS = [
    Mutant("lock_left_between", "undo.c", "    pms_undo_fence_locked(u); /* F1: the entries of all ranges",
           "    pms_lock_release(&u->lock);\n    pms_lock_acquire(&u->lock);\n    pms_undo_fence_locked(u); /* F1: the entries of all ranges",
           "the log lock is given up between entries and their fence: another thread's fault fences above them (I2)", first=("faults_between",)),
    Mutant("piece_unfenced", "undo.c", "    pms_persist_fence(&b->counters[i]);\n", "", "copies by all cores are fenced by the caller's core alone",
           first=("all_cores",)),
    Mutant("no_hand_over", "block.c", "        pms_persist_hand_over(&pool->persist);", "        (void)0;",
           "what a thread wrote back is not ordered before the commit of another", first=("turns",)),
]  # fmt: skip

_RECOVER = [
    Mutant("recover_by_one", "recover.c", "    pool->tx += 2;", "    pool->tx += 1;", "entries captured ahead of a commit cut off come back"),
    Mutant("recover_no_anchor", "recover.c", "    pms_persist_store8(&pool->persist, anchor, pms_anchor_pack(pool->tx));\n", "",
           "recovery does not move the anchor"),
    Mutant("recover_anchor_not_flushed", "recover.c", "    pms_persist_flush(&pool->persist, anchor, sizeof *anchor);\n", "",
           "recovery's anchor is never written back",
           equivalent="the session record is synced before the first transaction, and a sync writes back this line too"),
    Mutant("recover_no_settle", "recover.c", "    status = settle(pool, error);\n    if (status != PMS_OK)\n        return status;\n    /* By two",
           "    /* By two", "recovery gives the log up before the pre-images are home"),
    Mutant("recover_nothing", "recover.c", "    int64_t n = pms_undo_apply(&undo, pool->tx + 1, map->engine, &pool->super, NULL);",
           "    int64_t n = 0;", "recovery undoes nothing"),
    Mutant("recover_wrong_tag", "recover.c", "    int64_t n = pms_undo_apply(&undo, pool->tx + 1,", "    int64_t n = pms_undo_apply(&undo, pool->tx,",
           "recovery undoes the transaction before"),
    Mutant("anchor_check_ignored", "super.c", "    return pms_check16(ANCHOR_SALT, *tx) == word >> PMS_TX_BITS;", "    return true;",
           "an anchor's check bits are not compared", native=("test_damage",)),  # one aligned word, whole or not at all: against damage
]  # fmt: skip

_CAPTURE = [
    Mutant("fault_no_append", "capture.c", "        pms_undo_append(u, off, bytes);\n        warm(c, off, bytes);", "        warm(c, off, bytes);",
           "user's pages are unprotected without a pre-image", BOTH),
    Mutant("fault_no_note", "capture.c", "        pms_undo_note(u, PMS_DIRTY_USER, off, bytes, 0);", "",
           "captured pages are not on the list of what commit writes back", BOTH),
    Mutant("fault_unfenced", "capture.c", "        pms_undo_fence_locked(c->undo); /* F1: the entry, before", "        /* F1: the entry, before",
           "a page becomes writable before its entry is durable (I2)"),
    Mutant("fault_half", "capture.c", "        pms_undo_append(u, off, bytes);\n        warm(c, off, bytes);",
           "        pms_undo_append(u, off, bytes > PMS_PAGE ? bytes / 2 : bytes);\n        warm(c, off, bytes);",
           "only the first half of a range is captured", BOTH),
    Mutant("declared_unfenced", "capture.c", "    pms_undo_fence_locked(c->undo); /* F1: all entries", "    /* F1: all entries",
           "declared ranges become writable before their entries are durable"),
    Mutant("commit_leaves_writable", "capture.c", "        if (!leaves_writable(&u->dirty[i]))\n            continue;",
           "        if (!leaves_writable(&u->dirty[i]) || i % 2)\n            continue;", "some pages stay writable after a commit", BOTH),
]  # fmt: skip

_HEAP = [
    Mutant("descriptor_not_stored", "heap.c", "pms_undo_store_all(h->undo, store, ed->count);", "pms_undo_store_all(h->undo, store, ed->count - 1);",
           "the last extent descriptor of an edit is not stored", BOTH),
    Mutant("bit_not_set", "heap.c", "    word |= bit;\n    pms_undo_store(h->undo, at, &word, sizeof word);", "    word |= bit;",
           "an allocated slot is not marked in its bitmap", BOTH),
    Mutant("bit_not_cleared", "heap.c", "pms_table_load(h->map, at) & ~bit;", "pms_table_load(h->map, at) | bit;",
           "a freed slot stays marked", BOTH),
    Mutant("fresh_not_marked", "heap.c", "        pms_undo_mark_fresh(h->undo, x->page * PMS_PAGE, x->pages * PMS_PAGE);", "        ;",
           "pages of a new block are captured like live ones",
           equivalent="costs log space and time; nothing is lost"),
]  # fmt: skip

_DIRECTORY = [
    Mutant("dir_range_lost", "directory.c", "pms_undo_store_all(ctx->undo, e->store, e->stores);",
           "pms_undo_store_all(ctx->undo, e->store, e->stores - (e->stores > 0));", "the last range of a directory edit is not stored", BOTH),
    Mutant("object_not_born", "object.c", "        pms_undo_note_born(&pool->undo, data, bytes);", "        ;",
           "flushes do not learn of a new array in a page with others", first=("flush",)),
    Mutant("object_fill_not_flushed", "object.c", "        pms_persist_copy(f->persist, f->dst, f->src, f->bytes);",
           "        pms_persist_store(f->persist, f->dst, f->src, f->bytes);", "an array's first content is never written back",
           first=("born_beside",)),
    Mutant("pattern_not_flushed", "object.c", "        pms_persist_copy(f->persist, f->dst + at, from, f->bytes - at < unit ? f->bytes - at : unit);",
           "        pms_persist_store(f->persist, f->dst + at, from, f->bytes - at < unit ? f->bytes - at : unit);",
           "an array's first content is never written back"),
]  # fmt: skip

_JOURNAL = [
    Mutant("journal_no_sync", "journal.c", "    int failed = pms_persist_sync(j->map->persist, j->map->fd);", "    int failed = 0;",
           "a commit returns before its record is durable", FILE),
    Mutant("journal_images_crc", "journal.c", "    record->images_crc = sink.crc;", "    record->images_crc = 0;", "records carry no checksum of their images", FILE),
    Mutant("journal_images_unchecked", "journal_recover.c", "    *match = crc == record->images_crc;", "    *match = true;",
           "a record with torn images counts", FILE),
    Mutant("journal_head_unchecked", "journal_ring.c", "    *whole = !status && crc == record->crc;", "    *whole = !status;",
           "a record with a torn header counts", FILE),
    Mutant("journal_chain_unchecked", "journal_ring.c", "record->tx == tx && record->chain == chain)", "record->tx == tx)",
           "a record of an earlier life counts", FILE),
    Mutant("journal_tx_unchecked", "journal_ring.c", "record->tx == tx && record->chain == chain)", "record->chain == chain)",
           "a record of another transaction counts", FILE,
           "the chain is the checksum of the record before, which holds its transaction's number: it tells the next one by itself"),
    Mutant("journal_homes_unchecked", "journal_recover.c", "    if (!status && tx > r->anchor.tx)\n        status = homes_match(", "    if (false)\n        status = homes_match(",
           "a record counts though pages written straight home are torn", FILE),
    Mutant("journal_replay_none", "journal_recover.c", "            if (!status && !run.home)\n                status = replay_run(r, &run, image, error);",
           "            (void)image;", "recovery replays nothing and gives the journal up", FILE),
    Mutant("journal_replay_first_page", "journal_recover.c", "        image += n;\n        off += n;\n        left -= n;\n    }\n    return PMS_OK;\n}\n\nstatic int replay(",
           "        image += n;\n        off += n;\n        left = 0;\n    }\n    return PMS_OK;\n}\n\nstatic int replay(",
           "recovery replays at most one chunk of a run", FILE, first=("long_run",)),
    Mutant("journal_no_rechain", "journal_recover.c", "    r->anchor.chain = r->chain;\n    pms_anchor_rechain(&r->anchor);", "    r->anchor.chain = r->chain;",
           "after recovery a record dropped as torn may become valid by a later write", FILE),
    Mutant("anchor_no_first_sync", "journal_ring.c", "    int failed = pms_persist_sync(p, fd);\n    if (!failed)\n        failed = anchor_write", "    int failed = 0;\n    if (!failed)\n        failed = anchor_write",
           "the journal's anchor moves before the pages are home", FILE),
    Mutant("anchor_no_second_sync", "journal_ring.c", "        failed = pms_persist_sync(p, fd);\n        if (!failed && anchor_write(fd, p, anchor) == 0)",
           "        if (!failed && anchor_write(fd, p, anchor) == 0)", "both copies of the journal's anchor are written without a sync between", FILE),
    Mutant("anchor_one_copy", "journal_ring.c", "PMS_OFF_JANCHOR(next.generation & 1));", "PMS_OFF_JANCHOR(0));", "one copy of the journal's anchor is used", FILE),
    Mutant("home_images_dropped", "journal_home.c", "        int status = write ? home_pages(", "        int status = write && i == 0 ? home_pages(",
           "only the beginning of a run goes home", FILE),
    Mutant("home_images_unchecked", "journal_home.c", "    return b->crc == record->images_crc ? PMS_OK : damaged(record->tx, error);", "    (void)record;\n    return PMS_OK;",
           "damaged images go home and their record is given up", native=("test_journal",)),
]  # fmt: skip

_BESIDE = [
    Mutant("born_unkept", "undo.c", "void pms_undo_note_born(struct pms_undo *u, uint64_t off, uint64_t len)\n{\n    pms_snapshot_keep(u, off, len); /* I6 */",
           "void pms_undo_note_born(struct pms_undo *u, uint64_t off, uint64_t len)\n{", "a new block overwrites what a flush has still to read", BOTH,
           first=("flush",)),
    Mutant("fresh_unkept", "undo.c", "void pms_undo_mark_fresh(struct pms_undo *u, uint64_t off, uint64_t len)\n{\n    pms_snapshot_keep(u, off, len); /* I6 */",
           "void pms_undo_mark_fresh(struct pms_undo *u, uint64_t off, uint64_t len)\n{", "fresh pages are overwritten before a flush has read what was there",
           BOTH, first=("flush",)),
    Mutant("idle_unkept", "idle.c", "    pms_snapshot_keep(u, off, len); /* I6 */", "", "a step of slots overwrites what a flush has still to read", BOTH,
           first=("slots_flush",)),
    Mutant("flip_back_unkept", "idle.c", "        pms_snapshot_keep(u, off, len);\n    pms_undo_lock(u);", "        {}\n    pms_undo_lock(u);",
           "a step in place after a flip back overwrites what a flush has still to read", BOTH, first=("slots_flush",)),
    Mutant("landing_of_the_current", "landing.c", "            if (i != current)\n", "            if (i != current || true)\n",
           "a landing that was prepared before another one flipped is copied into the committed version", native=("test_landing",)),
    Mutant("transaction_unkept", "tx.c", "    pms_snapshot_keep_transaction(&pool->undo); /* gives", "    /* gives",
           "the log is used again while a flush needs its pre-images", BOTH, first=("flush",)),
    Mutant("append_unnoted", "undo.c", "    bool alone = !u->gathering && len >= PMS_UNDO_PARALLEL;\n    pms_undo_set_changed(u, off, len);",
           "    bool alone = !u->gathering && len >= PMS_UNDO_PARALLEL;", "flushes do not learn of captured pages", BOTH, first=("flush",)),
    Mutant("fresh_unnoted", "undo.c", "    pms_undo_set_changed(u, off, len);\n    if (!all_listed", "    if (!all_listed",
           "flushes do not learn of fresh pages", BOTH, first=("flush",)),
    Mutant("publish_unnoted", "idle.c", "    pms_undo_change_block(u, off, len);\n", "", "flushes do not learn of a flip", BOTH, first=("slots_flush",)),
    Mutant("publish_not_listed", "idle.c", "    pms_undo_note(u, PMS_DIRTY_FRESH, off, used, 0);", "    (void)used;", "a published slot is not on the list of what commit writes back",
           BOTH, first=("slots_flip",)),
    Mutant("publish_short", "idle.c", "    pms_undo_note(u, PMS_DIRTY_FRESH, off, used, 0);", "    pms_undo_note(u, PMS_DIRTY_FRESH, off, used > PMS_PAGE ? used - PMS_PAGE : used, 0);",
           "the last page of a published slot is not written back", BOTH, first=("slots_flip",)),
    Mutant("flip_unpublished", "slot.c", "        pms_idle_publish(&pool->undo, b.extent_off, b.extent_bytes, used_pages(&pair, &b));", "        (void)used_pages;", "a flip does not publish the slot",
           BOTH, first=("slots_flip",)),
    Mutant("landing_unpublished", "landing.c", "            pms_idle_publish_locked(&pool->undo, f->block.extent_off, f->block.extent_bytes, f->used);", "            ;",
           "a mirror's slot is not published", BOTH, first=("mirrors",)),
    Mutant("landing_not_described", "landing.c", "        describe(pool, f, f->ask.meta);", "        ;", "a landing does not flip", BOTH, first=("mirrors",)),
    Mutant("landing_copies_nothing", "landing.c", "        copy_in(pool, c);", "        ;", "a mirror's bytes are not copied", BOTH, first=("mirrors",)),
    Mutant("landing_never_fails", "landing.c", "    if (status == PMS_OK && atomic_load(&l->failed))", "    if (false)", "a copy that failed counts as made",
           BOTH, first=("mirrors",)),
    Mutant("list_range_lost", "list_edit.c", "pms_undo_store_all(undo, c.store, c.count);", "pms_undo_store_all(undo, c.store, c.count - (c.count > 1));",
           "the last range of an edit of a list is not stored", BOTH, first=("list_edits", "list_splits")),
]  # fmt: skip

_HEAD = [
    Mutant("session_one_copy", "super.c", "PMS_OFF_SESSION(session->generation & 1));", "PMS_OFF_SESSION(0));", "one copy of the session record is used", BOTH),
    Mutant("super_one_copy", "super.c", "    errno = pms_persist_pwrite(p, fd, super, sizeof *super, PMS_OFF_SUPER(super->generation & 1));\n    if (!errno)\n        errno = pms_persist_sync(p, fd); /* this copy",
           "    errno = pms_persist_pwrite(p, fd, super, sizeof *super, PMS_OFF_SUPER(0));\n    if (!errno)\n        errno = pms_persist_sync(p, fd); /* this copy",
           "one copy of the superblock is used", BOTH, first=("grow",)),
    Mutant("super_no_sync", "super.c", "        errno = pms_persist_sync(p, fd); /* this copy, before anything", "        errno = 0; /* this copy, before anything",
           "a superblock is relied on before it is durable", BOTH, first=("grow",)),
    Mutant("grow_no_sync", "super.c", "    errno = pms_persist_sync(p, fd); /* page tables before the superblock that refers to them */", "    errno = 0;",
           "a superblock refers to page tables that are not durable", BOTH, first=("grow",)),
    Mutant("in_place_unasked", "transfer.c", "        if (pms_snapshot_in_place(w->snapshot, off, w->item_bytes, &at, NULL)) {",
           "        if ((at = NULL, true)) {", "what was stored to while a flush wrote it in place is taken for the snapshot's",
           native=("test_in_place",)),
    Mutant("in_place_changed", "snapshot.c", "           pms_undo_page_changed(u, page) < s->tag && ", "           ",
           "a flush writes captured pages as they are now", native=("test_in_place",)),
    Mutant("in_place_idle", "snapshot.c", " && pms_undo_page_tag(u, page) != PMS_TAG_IDLE;", ";",
           "a flush sums up an idle slot before it is scribbled into, and writes it after that", native=("test_in_place",)),
    Mutant("in_place_lost", "snapshot.c", "    bool untouched = !s->lost;", "    bool untouched = true;",
           "a flush takes what it finds for the snapshot's though nothing was kept for it any more", native=("test_in_place",)),
    Mutant("in_place_kept", "snapshot.c", "is_state(&s->super, page) && atomic_load_explicit(&s->slot[page], memory_order_acquire) == 0 &&",
           "is_state(&s->super, page) &&", "an idle slot that came and went while a flush wrote it in place goes unnoticed",
           native=("test_in_place",)),
    Mutant("own_unnoted", "map.c", "        set_bits(m->own, off, bytes, true);", "        (void)0;",
           "a page that was stored to is taken for the file's, and given up", native=("test_map",)),
    Mutant("hot_unmarked", "undo.c", "    PMS_ASSERT(p.len == len);\n    pms_undo_set_changed(u, off, len);", "    PMS_ASSERT(p.len == len);",
           "a flush takes a hot range for untouched", native=("test_in_place",)),
    Mutant("growth_unnoted", "pool.c", "    pms_undo_set_changed(&pool->undo, added->table_off, added->log_off - added->table_off);", "    (void)added;",
           "flushes do not learn of a new part's page table", BOTH, first=("grow_between",)),
    Mutant("super_crc_unchecked", "super.c", "    if (s->crc != super_crc(s) || ", "    if (", "a damaged superblock counts", native=("test_damage",)),
]  # fmt: skip

MUTANTS: list[Mutant] = [*_UNDO, *_TX, *_LOCKS, *_RECOVER, *_CAPTURE, *_HEAP, *_DIRECTORY, *_JOURNAL, *_BESIDE, *_HEAD]
