/* The bytes of a store file. docs/FORMAT.md describes them in prose; this header is the truth.
 *
 * Everything is little-endian, every reference is an offset from the start of the file, and an
 * offset is also the distance from the base of every mapping. All sizes are in bytes unless the
 * name says pages. */
#ifndef PMS_BASE_LAYOUT_H
#define PMS_BASE_LAYOUT_H

#include <assert.h>
#include <stdint.h>

#define PMS_PAGE 4096u            /* unit of protection, of the journal and of large extents */
#define PMS_LINE 64u              /* cache line: unit of write-back */
#define PMS_GRANULE 32u           /* unit of capture for the engine's own stores */
#define PMS_HUGE (2u << 20)       /* extents of this size and more are aligned to it */
#define PMS_MIN_SIZE (1ull << 20) /* of a store */

#define PMS_MAGIC "PMSTORE\n" /* 8 bytes, no NUL */
#define PMS_VERSION 2u

/* ---- features that must be known: bits of the superblock's features_incompat ---- */
/* Each log is cut in halves, taken in turn: room for a transaction that is held (struct pms_held)
 * beside the one that runs. */
#define PMS_FEATURE_HOLD 1ull
/* The page table marks blocks of slots (PMS_KIND_SLOT), for which no log is backed. */
#define PMS_FEATURE_THIN 2ull
#define PMS_FEATURES (PMS_FEATURE_HOLD | PMS_FEATURE_THIN)

/* ---- fixed pages at the start of the file ---- */
#define PMS_OFF_SUPER(copy) ((uint64_t)(copy) * PMS_PAGE)            /* copy 0, 1 */
#define PMS_OFF_ANCHOR (2ull * PMS_PAGE)                             /* byte domains: one word */
#define PMS_OFF_JANCHOR(copy) ((3ull + (uint64_t)(copy)) * PMS_PAGE) /* domain file: copy 0, 1 */
#define PMS_OFF_SESSION(copy) ((5ull + (uint64_t)(copy)) * PMS_PAGE) /* copy 0, 1 */
/* logged data of the engine */
#define PMS_OFF_ROOT (7ull * PMS_PAGE)
#define PMS_FASTLOG_BYTES (128u << 10)
#define PMS_OFF_FASTLOG(parity) (8ull * PMS_PAGE + (uint64_t)(parity) * PMS_FASTLOG_BYTES)
/* first byte after the fixed part */
#define PMS_OFF_SEGMENTS (8ull * PMS_PAGE + 2ull * PMS_FASTLOG_BYTES)

/* ---- superblock: two copies, the valid one with the higher generation holds ---- */
#define PMS_MAX_SEGMENTS 60u

/* One step of growth: page table, log and data, in this order, each page-aligned. */
struct pms_segment {
    uint64_t table_off; /* data_pages entries of struct pms_pte */
    uint64_t log_off;
    uint64_t log_bytes; /* multiple of PMS_PAGE */
    uint64_t data_off;
    uint64_t data_pages;
    uint64_t reserved[3]; /* zero */
};
static_assert(sizeof(struct pms_segment) == 64, "segment");

struct pms_superblock {
    uint8_t magic[8];
    uint32_t version;
    uint32_t page_bytes;        /* PMS_PAGE */
    uint64_t features_incompat; /* unknown bit: refuse to open */
    uint64_t features_compat;   /* unknown bit: ignore */
    uint8_t uuid[16];
    uint64_t generation;    /* +1 at every rewrite; copy = generation & 1 */
    uint64_t file_bytes;    /* end of the last segment; the file is at least this long */
    uint64_t max_bytes;     /* growth stops here; 0 = until the file system is full */
    uint64_t hash_seed;     /* of directory hashes */
    uint32_t segment_count; /* 1 .. PMS_MAX_SEGMENTS */
    /* enum pms_domain asked for at creation; PMS_DOMAIN_AUTO: decide at open */
    uint32_t domain;
    uint64_t reserved[5]; /* zero */
    struct pms_segment segment[PMS_MAX_SEGMENTS];
    uint8_t pad[PMS_PAGE - 128 - 60 * 64 - 8]; /* zero */
    uint32_t pad2;                             /* zero */
    uint32_t crc;                              /* CRC-32C of all bytes before it */
};
static_assert(sizeof(struct pms_superblock) == PMS_PAGE, "superblock");

/* ---- anchor of the byte-addressable domains: one aligned word ---- bits 0..47: id of the last
 * finished transaction; bits 48..63: check bits of those 48. */
#define PMS_TX_BITS 48u
#define PMS_TX_MASK ((1ull << PMS_TX_BITS) - 1)

/* ---- the held version: two lines behind the anchor's, by the parity of the transaction ----
 * "The log still has all that transaction tag overwrote." */
#define PMS_OFF_HELD(tx) (PMS_OFF_ANCHOR + (1 + ((tx) & 1)) * PMS_LINE)

enum pms_held_for {
    PMS_HELD_NOT = 0,       /* released, or never held */
    PMS_HELD_FOR_STORE = 1, /* open(hold=True) */
    PMS_HELD_FOR_JOB = 2,   /* pms_hold_for_job: until all ranks have the commit after it */
};

struct pms_held {
    uint64_t tag;         /* the transaction */
    uint64_t entries;     /* its entries in the log: all of them, or it is not held */
    uint32_t held;        /* enum pms_held_for */
    uint8_t reserved[40]; /* zero */
    uint32_t crc;         /* CRC-32C of all bytes before it, from the session's nonce on */
};
static_assert(sizeof(struct pms_held) == PMS_LINE, "held");

/* ---- session record: outside transactions, double-buffered by generation ---- */
#define PMS_HISTORY_BYTES 384u
enum pms_session_state { PMS_SESSION_CLEAN = 1, PMS_SESSION_DIRTY = 2 };

struct pms_session {
    uint64_t generation; /* copy = generation & 1 */
    uint32_t state;      /* enum pms_session_state */
    uint32_t domain;     /* enum pms_domain in force: tells which log holds the state */
    uint8_t boot_id[16]; /* of the machine's run in which the store was opened for writing */
    int64_t pid;
    int64_t opened_ns;                  /* CLOCK_REALTIME */
    uint64_t opens;                     /* opens for writing since creation */
    uint64_t unclean;                   /* of these, how many found no clean mark */
    uint8_t history[PMS_HISTORY_BYTES]; /* scheduler's failure history; zero until it writes one */
    uint64_t nonce;                     /* drawn at each open for writing: see pms_session_seed */
    /* of the file, and when it was created (CLOCK_REALTIME): a copy has others. 0: not known */
    uint64_t inode;
    int64_t born_ns;
    uint8_t footer;      /* 1: the page behind the last segment is kept, see footer.h */
    uint8_t unused[7];   /* zero */
    uint64_t backed;     /* at least so many bytes of entries have their room on the disk; 0: ask */
    uint8_t secret[16];  /* drawn at each open for writing: who can say it may read the file */
    uint8_t reserved[4]; /* zero */
    uint32_t crc;
};
static_assert(sizeof(struct pms_session) == 512, "one sector");

/* ---- root page: ordinary logged data ---- */
struct pms_root {
    uint64_t epoch;     /* number of commits */
    uint64_t directory; /* offset of the root directory's header */
    uint64_t reserved[6];
};
static_assert(sizeof(struct pms_root) == PMS_LINE, "root");

/* ---- undo log entry ---- 64-byte aligned. A pre-image of at most 32 bytes follows the header
 * in the same line; a longer one starts at +64. The entry's end is rounded up to 64. */
struct pms_entry {
    uint64_t tag;      /* transaction that captured: anchor.tx + 1 while it runs (I1) */
    uint64_t target;   /* where the pre-image belongs */
    uint32_t seq;      /* 0, 1, 2, ... in one transaction */
    uint32_t len;      /* of the pre-image */
    uint32_t reserved; /* zero */
    uint32_t crc;      /* CRC-32C of the 28 bytes before and of the pre-image */
};
static_assert(sizeof(struct pms_entry) == 32, "entry");

/* ---- page table: who owns the data pages ---- One entry for each data page; only the entry of
 * an extent's first page has a word. Extents tile the segment. Bits of the word: 0..35 pages,
 * 36..43 size class, 44..47 kind, 48..63 check bits of (file page number, word). */
enum pms_kind {
    PMS_KIND_FREE = 1,
    PMS_KIND_LARGE = 2, /* one block, user's */
    PMS_KIND_SLAB = 3,  /* blocks of one size class, user's */
    /* the same two, the engine's: never writable through the user's view */
    PMS_KIND_META_LARGE = 4,
    PMS_KIND_META_SLAB = 5,
    /* LARGE, of a pair of slots: no log is backed for it before it is captured (I5) */
    PMS_KIND_SLOT = 6,
};

struct pms_pte {
    uint64_t word;
    uint64_t aux; /* LARGE: bytes asked for. Else zero. */
};
static_assert(sizeof(struct pms_pte) == 16, "pte");
/* A slab's bitmap (1 = in use) lies in the entries of its 2nd page and later, read as an array of
 * 2 * (pages - 1) words of 64 bits. Words and bits beyond the slab's slot count are zero. */

/* ---- journal of domain file ---- The logs of all segments, in order, form one linear space of
 * which the first `window` bytes are a ring. Positions grow for ever; position p lies at p %
 * window. Records start at page boundaries. */
struct pms_janchor {
    uint64_t generation; /* copy = generation & 1 */
    uint64_t tx;         /* last transaction whose images are all home */
    uint64_t head;       /* position of the record of transaction tx + 1, if there is one */
    uint64_t window;     /* bytes, multiple of PMS_PAGE */
    /* what the record of tx + 1 carries: crc of the record of tx, or a new start after a reset */
    uint32_t chain;
    uint32_t zero;
    /* transaction whose record, should it be the last one, holds nothing any more; 0: none */
    uint64_t let_go;
    uint8_t pad[512 - 48 - 4];
    uint32_t crc;
};
static_assert(sizeof(struct pms_janchor) == 512, "one sector");

/* followed by runs, padded to a page; then the images of the runs not marked home, in order */
struct pms_record {
    /* PMS_RECORD_MAGIC; its highest byte: enum pms_held_for. While a record that holds is the last
     * one its images are not written home */
    uint64_t magic;
    uint64_t tx;
    uint64_t bytes;       /* of the whole record, multiple of PMS_PAGE */
    uint64_t image_bytes; /* of the images */
    uint32_t run_count;
    uint32_t chain;      /* crc of the record before */
    uint32_t images_crc; /* CRC-32C of all images */
    /* CRC-32C of this header (crc = 0) and of the runs, from the session's seed */
    uint32_t crc;
};
static_assert(sizeof(struct pms_record) == 48, "record");
#define PMS_RECORD_MAGIC 0x314c4e4a534d50ull
#define PMS_RECORD_HELD_BIT 56u

struct pms_run {
    uint64_t page; /* file page number of the first page */
    uint32_t pages;
    uint32_t home_crc; /* runs written straight home: CRC-32C of their bytes; else zero */
    uint32_t home; /* 1: written straight home before the record became durable; no image here */
    uint32_t reserved;
};
static_assert(sizeof(struct pms_run) == 24, "run");

/* ---- directory: a map from names to objects, in the heap ---- A header block, a table block of
 * slots (power of two, linear probing), and a node block for each name. Nodes form a doubly
 * linked list in order of insertion. */
struct pms_dir_header {
    uint64_t count; /* live names */
    uint64_t used;  /* slots that are not empty: live + deleted */
    uint64_t slots; /* power of two */
    uint64_t table; /* offset of slots * struct pms_dir_slot */
    uint64_t first; /* offset of the oldest node, or 0 */
    uint64_t last;
    uint64_t reserved[2];
};
static_assert(sizeof(struct pms_dir_header) == PMS_LINE, "dir header");

struct pms_dir_slot {
    uint64_t hash; /* of the name, keyed by hash_seed; 0 with node 0 = empty */
    uint64_t node; /* offset; PMS_DIR_DELETED = was in use */
};
static_assert(sizeof(struct pms_dir_slot) == 16, "dir slot");
#define PMS_DIR_DELETED 1ull

/* What else a new kind needs: its bytes in docs/FORMAT.md, and a bit of the format that keeps older
 * versions off; what names/directory*.c, list.c and objects/object.c, check.c ask by kind (sound,
 * bound, freed, walked); pms.cdef and _engine/constants.py; what is asked by kind in objects/
 * (entries, containers, names, soundness), formats/ (portable, compaction) and tiers/image.py. */
enum pms_object_kind {
    PMS_OBJECT_VALUE = 1, /* meta is the value itself (msgpack); no data block */
    /* meta describes the array (msgpack); data block, or none if it has zero bytes */
    PMS_OBJECT_ARRAY = 2,
    PMS_OBJECT_GROUP = 3, /* data is the offset of another directory's header */
    PMS_OBJECT_LIST = 4,  /* data is the offset of a list's header */
};

struct pms_node { /* followed by the name (UTF-8, no NUL, no '/'), then meta */
    uint64_t hash;
    uint64_t prev; /* in order of insertion; 0 = none */
    uint64_t next;
    uint64_t data;       /* offset of the object's block, or 0 */
    uint64_t data_bytes; /* of the object, not of its block */
    uint32_t kind;       /* enum pms_object_kind */
    uint32_t meta_bytes;
    uint32_t name_bytes;
    uint32_t meta_room; /* bytes for meta: a new meta of at most this size is written in place */
    uint64_t reserved;  /* zero */
};
static_assert(sizeof(struct pms_node) == PMS_LINE, "node");
#define PMS_NAME_MAX 4096u
#define PMS_GROUPS_MAX                                                        \
    100u /* groups within groups: deeper is a cycle, or nothing a person made \
          */

/* ---- list: a counted B+tree over items, in the heap ---- A header block, and tree nodes of 1
 * KiB. Leaves (level 0) hold offsets of items, in order; an inner node holds its children and
 * how many items are below each. An item is a block of its own. */
struct pms_list_header {
    uint64_t magic;
    uint64_t count; /* items */
    uint64_t root;  /* offset of a node; 0 if there are no items */
    uint32_t level; /* of the root: 0 = leaf */
    uint32_t zero;
    uint64_t reserved[4]; /* zero */
};
static_assert(sizeof(struct pms_list_header) == PMS_LINE, "list header");
#define PMS_LIST_MAGIC 0x5453494c534d50ull

struct pms_list_child {
    uint64_t node;
    uint64_t count; /* items below it, > 0 */
};
#define PMS_LIST_ITEMS 126u
#define PMS_LIST_CHILDREN 63u
#define PMS_LIST_LEVELS 16u /* nodes on the way from the root to an item, at most */

struct pms_list_node {
    uint32_t magic;
    uint16_t level;
    uint16_t used; /* items or children, > 0 */
    uint64_t zero;
    union {
        uint64_t item[PMS_LIST_ITEMS];
        struct pms_list_child child[PMS_LIST_CHILDREN];
    };
};
static_assert(sizeof(struct pms_list_node) == 1024, "list node");
#define PMS_LIST_NODE_MAGIC 0x4c534d50u

struct pms_item { /* followed by meta, as a directory node's */
    uint64_t data;
    uint64_t data_bytes;
    uint32_t kind; /* PMS_OBJECT_VALUE or PMS_OBJECT_ARRAY */
    uint32_t meta_bytes;
    uint64_t reserved; /* zero */
};
static_assert(sizeof(struct pms_item) == 32, "item");

enum pms_domain { /* stored: never renumber */
                  PMS_DOMAIN_AUTO = 0,
                  PMS_DOMAIN_DAX = 1,
                  PMS_DOMAIN_FILE = 2,
                  PMS_DOMAIN_PROCESS = 3,
                  PMS_DOMAIN_EMULATED = 4,
};

#endif
