/* Events of an ordinary Kineto trace to columns, in one pass over the text and without a Python object per event.

   scan(text, kinds, settings) takes a JSON array of events as bytes and returns its columns, or None if anything in it
   is not plain: then the reader in Python, which decides what every file means, reads the piece.  So this file needs to
   know only what is written usually, and exactly that: strict JSON in valid UTF-8, known keys once each, times with at most
   three decimals, integers of at most 18 digits.  scanned.py turns what it returns into the columns of a trace.

   Memory safety: the buffer of bytes ends with a zero byte, which is valid nowhere in JSON; the cursor never moves past
   a byte that was not compared with something else before.  Depth, string tables and probes are bounded.

   It uses the limited API of Python 3.10 only. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

typedef const unsigned char *Cursor;
typedef struct {
    Cursor start;
    Py_ssize_t size; /* -1: missing */
} Span;

/* Limits: beyond them the reader in Python takes over. */
#define MOST_DEPTH 32
#define MOST_DIGITS 18
#define MOST_PROBES 64
#define LONGEST_PLACE 200
#define LATEST_US 2300000000000000LL /* below 2^61 ns */
#define EXACT_US 8796093022208LL     /* 2^43: a double has three exact decimals below it */

/* -- JSON ---------------------------------------------------------------------------------------------------------- */

static unsigned char PLAIN[256]; /* inside a string: printable ASCII without quote and backslash */

static inline Cursor blank(Cursor at) {
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') at++;
    return at;
}

static inline int is_digit(unsigned char c) { return c >= '0' && c <= '9'; }

static int is_hex(unsigned char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

/* Past a character that is not ASCII; NULL: not UTF-8. */
static Cursor character_end(Cursor at) {
    unsigned char first = *at, low = 0x80, high = 0xBF;
    int more;
    if (first >= 0xC2 && first <= 0xDF) more = 1;
    else if (first >= 0xE0 && first <= 0xEF) {
        more = 2;
        if (first == 0xE0) low = 0xA0;  /* else it would fit into two bytes */
        if (first == 0xED) high = 0x9F; /* half of a surrogate pair */
    } else if (first >= 0xF0 && first <= 0xF4) {
        more = 3;
        if (first == 0xF0) low = 0x90;
        if (first == 0xF4) high = 0x8F; /* the last code point */
    } else return NULL;
    for (at++; more; more--, at++) {
        if (*at < low || *at > high) return NULL;
        low = 0x80;
        high = 0xBF;
    }
    return at;
}

#define LITTLE_ENDIAN_WORDS (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

/* Whether two pieces of text are equal; most are so short that a call of memcmp costs more than what it does. */
static inline int same(Cursor one, Cursor other, Py_ssize_t size) {
    uint64_t word, wanted;
    if (size < 8) {
        while (size && one[size - 1] == other[size - 1]) size--;
        return !size;
    }
    for (; size > 8; one += 8, other += 8, size -= 8) {
        memcpy(&word, one, 8);
        memcpy(&wanted, other, 8);
        if (word != wanted) return 0;
    }
    memcpy(&word, one + size - 8, 8); /* may overlap what was compared */
    memcpy(&wanted, other + size - 8, 8);
    return word == wanted;
}

/* Past the closing quote; `at` is after the opening one.  NULL: not a plain string. */
static inline Cursor string_end(Cursor at, Cursor end, int *escaped) {
    const uint64_t ones = 0x0101010101010101ULL, tops = 0x8080808080808080ULL;
    *escaped = 0;
    for (;;) {
#ifdef __SSE2__
        while (end - at >= 16) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)at);
            /* Compared as signed: what is not ASCII is negative. */
            __m128i odd = _mm_or_si128(_mm_cmplt_epi8(bytes, _mm_set1_epi8(0x20)),
                                       _mm_or_si128(_mm_cmpeq_epi8(bytes, _mm_set1_epi8('"')),
                                                    _mm_cmpeq_epi8(bytes, _mm_set1_epi8('\\'))));
            unsigned which = (unsigned)_mm_movemask_epi8(odd);
            if (which) {
                at += __builtin_ctz(which);
                if (*at == '"') return at + 1;
                break;
            }
            at += 16;
        }
#endif
        while (end - at >= 8) {
            uint64_t word, quote, slash, odd;
            memcpy(&word, at, 8);
            quote = word ^ (ones * '"');
            slash = word ^ (ones * '\\');
            odd = (((quote - ones) & ~quote) | ((slash - ones) & ~slash) | ((word - ones * 0x20) & ~word) | word) & tops;
            if (odd) {
#if LITTLE_ENDIAN_WORDS
                at += __builtin_ctzll(odd) >> 3; /* borrows change only later bytes */
#endif
                break;
            }
            at += 8;
        }
        while (PLAIN[*at]) at++;
        if (*at == '"') return at + 1;
        if (*at >= 0x80) {
            at = character_end(at);
            if (!at) return NULL;
            continue;
        }
        if (*at != '\\') return NULL;
        *escaped = 1;
        at++;
        switch (*at) {
        case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
            at++;
            break;
        case 'u':
            for (int digit = 1; digit <= 4; digit++)
                if (!is_hex(at[digit])) return NULL;
            if ((at[1] | 0x20) == 'd' && at[2] >= '8') return NULL; /* half of a surrogate pair */
            at += 5;
            break;
        default:
            return NULL;
        }
    }
}

static Cursor number_end(Cursor at) {
    if (*at == '-') at++;
    if (*at == '0') at++;
    else if (is_digit(*at)) while (is_digit(*at)) at++;
    else return NULL;
    if (*at == '.') {
        at++;
        if (!is_digit(*at)) return NULL;
        while (is_digit(*at)) at++;
    }
    if (*at == 'e' || *at == 'E') {
        at++;
        if (*at == '+' || *at == '-') at++;
        if (!is_digit(*at)) return NULL;
        while (is_digit(*at)) at++;
    }
    return at;
}

static inline Cursor word_end(Cursor at, const char *word) {
    while (*word) if (*at++ != (unsigned char)*word++) return NULL;
    return at;
}

static Cursor value_end(Cursor at, Cursor end, int depth) {
    int escaped;
    switch (*at) {
    case '"': return string_end(at + 1, end, &escaped);
    case 't': return word_end(at, "true");
    case 'f': return word_end(at, "false");
    case 'n': return word_end(at, "null");
    case '[':
        if (depth == MOST_DEPTH) return NULL;
        at = blank(at + 1);
        if (*at == ']') return at + 1;
        for (;;) {
            at = value_end(at, end, depth + 1);
            if (!at) return NULL;
            at = blank(at);
            if (*at == ']') return at + 1;
            if (*at != ',') return NULL;
            at = blank(at + 1);
        }
    case '{':
        if (depth == MOST_DEPTH) return NULL;
        at = blank(at + 1);
        if (*at == '}') return at + 1;
        for (;;) {
            if (*at != '"') return NULL;
            at = string_end(at + 1, end, &escaped);
            if (!at) return NULL;
            at = blank(at);
            if (*at != ':') return NULL;
            at = value_end(blank(at + 1), end, depth + 1);
            if (!at) return NULL;
            at = blank(at);
            if (*at == '}') return at + 1;
            if (*at != ',') return NULL;
            at = blank(at + 1);
        }
    default: return number_end(at);
    }
}

/* Whether a number may follow another byte: else `12.5` would be read as the integer 12. */
static inline int number_goes_on(unsigned char c) { return is_digit(c) || c == '.' || c == 'e' || c == 'E'; }

static const int64_t TENS[] = {1, 10, 100, 1000, 10000, 100000, 1000000, 10000000};

/* Past digits, at most MOST_DIGITS of them. */
static inline Cursor digits_end(Cursor at, Cursor end, int64_t *value) {
    int64_t sum = 0;
    Cursor first = at;
#if LITTLE_ENDIAN_WORDS
    /* Eight bytes at once.  Twice at most: with 16 digits read, the rest is left to the loop below. */
    while (end - at >= 8 && at - first <= 8) {
        uint64_t word, odd;
        int count;
        memcpy(&word, at, 8);
        word ^= 0x3030303030303030ULL; /* digits become 0 to 9, all others larger */
        odd = (((word & 0x7F7F7F7F7F7F7F7FULL) + 0x7676767676767676ULL) | word) & 0x8080808080808080ULL;
        count = odd ? __builtin_ctzll(odd) >> 3 : 8;
        if (!count) break;
        word <<= 64 - 8 * count; /* the first digit is the lowest byte: zeros before it */
        word = word * 10 + (word >> 8);
        word = ((word & 0x000000FF000000FFULL) * 0x000F424000000064ULL +
                ((word >> 16) & 0x000000FF000000FFULL) * 0x0000271000000001ULL) >> 32;
        sum = sum * (count == 8 ? 100000000 : TENS[count]) + (int64_t)(word & 0xFFFFFFFFULL);
        at += count;
        if (count < 8) {
            *value = sum;
            return at;
        }
    }
#else
    (void)end;
#endif
    while (is_digit(*at) && at - first < MOST_DIGITS) sum = sum * 10 + (*at++ - '0');
    *value = sum;
    return at;
}

static inline Cursor integer(Cursor at, Cursor end, int64_t *value) {
    int below = *at == '-';
    int64_t sum;
    Cursor first;
    at += below;
    first = at;
    at = digits_end(at, end, &sum);
    if (at == first || (*first == '0' && at - first > 1) || number_goes_on(*at)) return NULL;
    *value = below ? -sum : sum;
    return at;
}

/* Microseconds, not negative and with at most three decimals, to nanoseconds. */
static inline Cursor time_ns(Cursor at, Cursor end, int64_t *value, int exact_as_double) {
    int64_t whole, decimals = 0, scale = 1000;
    Cursor first = at;
    at = digits_end(at, end, &whole);
    if (at == first || (*first == '0' && at - first > 1) || whole > LATEST_US) return NULL;
    if (*at == '.') {
        if (exact_as_double && whole >= EXACT_US) return NULL;
        at++;
        if (!is_digit(*at)) return NULL;
        while (is_digit(*at) && scale > 1) {
            scale /= 10;
            decimals += (*at++ - '0') * scale;
        }
    }
    if (number_goes_on(*at)) return NULL;
    *value = whole * 1000 + decimals;
    return at;
}

static const double POWERS[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};

/* Exact where digits fit into a double's 53 bits: one division then rounds once. */
static Cursor real(Cursor at, double *value) {
    int below = *at == '-', digits = 0, after = 0;
    int64_t sum = 0;
    Cursor first;
    at += below;
    first = at;
    while (is_digit(*at) && digits < 16) sum = sum * 10 + (*at++ - '0'), digits++;
    if (at == first || (*first == '0' && at - first > 1)) return NULL;
    if (*at == '.') {
        at++;
        if (!is_digit(*at)) return NULL;
        while (is_digit(*at) && digits < 16) sum = sum * 10 + (*at++ - '0'), digits++, after++;
    }
    if (digits > 15 || number_goes_on(*at)) return NULL;
    *value = (double)sum / POWERS[after];
    if (below) *value = -*value;
    return at;
}

/* -- growing columns ----------------------------------------------------------------------------------------------- */

typedef struct {
    char *data;
    Py_ssize_t size, room;
} Column;

static inline int put(Column *column, const void *value, Py_ssize_t size) {
    if (column->size + size > column->room) {
        Py_ssize_t room = column->room ? 2 * column->room : 4096;
        char *data = PyMem_Realloc(column->data, (size_t)room);
        if (!data) return -1;
        column->data = data;
        column->room = room;
    }
    memcpy(column->data + column->size, value, (size_t)size);
    column->size += size;
    return 0;
}

/* -- tables of texts: each text once, numbered in the order in which it first appears -------------------------------- */

typedef struct {
    Span text;
    uint64_t hash;
    int32_t number;
    int32_t flag; /* what a caller wants to remember of a text; 0: nothing yet */
} Entry;

typedef struct {
    Entry *entries; /* by hash */
    Py_ssize_t room;
    Column order; /* Span by number */
    int32_t count;
} Texts;

static inline uint64_t hash_of(Cursor at, Py_ssize_t size) {
    uint64_t hash = (uint64_t)size * 0x9E3779B97F4A7C15ULL, word;
    if (size >= 32) { /* names of kernels: four lanes, which do not wait for one another */
        uint64_t words[4], lanes[4] = {hash, ~hash, hash >> 7, hash << 7};
        for (; size >= 32; at += 32, size -= 32) {
            memcpy(words, at, 32);
            for (int lane = 0; lane < 4; lane++) {
                lanes[lane] = (lanes[lane] ^ words[lane]) * 0x9FB21C651E98DF25ULL;
                lanes[lane] ^= lanes[lane] >> 29;
            }
        }
        hash = lanes[0];
        for (int lane = 1; lane < 4; lane++) hash = (hash ^ (hash >> 32) ^ lanes[lane]) * 0x9FB21C651E98DF25ULL;
    }
    for (; size >= 8; at += 8, size -= 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0x9FB21C651E98DF25ULL;
        hash ^= hash >> 32;
    }
    word = 0;
    memcpy(&word, at, (size_t)size);
    hash = (hash ^ word) * 0x9FB21C651E98DF25ULL;
    hash = (hash ^ (hash >> 32)) * 0xC4CEB9FE1A85EC53ULL;
    return hash ^ (hash >> 32); /* the table uses the lowest bits */
}

static int grow(Texts *texts) {
    Py_ssize_t room = texts->room ? 2 * texts->room : 256;
    Entry *entries = PyMem_Calloc((size_t)room, sizeof(Entry));
    if (!entries) return -1;
    for (Py_ssize_t old = 0; old < texts->room; old++) {
        Py_ssize_t slot;
        if (!texts->entries[old].text.start) continue;
        slot = (Py_ssize_t)(texts->entries[old].hash & (uint64_t)(room - 1));
        while (entries[slot].text.start) slot = (slot + 1) & (room - 1);
        entries[slot] = texts->entries[old];
    }
    PyMem_Free(texts->entries);
    texts->entries = entries;
    texts->room = room;
    return 0;
}

typedef enum { FINE, UNUSUAL, FAILED } Outcome;

/* The text must live as long as the table. */
static inline Outcome find(Texts *texts, Span text, Entry **found) {
    uint64_t hash = hash_of(text.start, text.size);
    Py_ssize_t slot;
    if (2 * (Py_ssize_t)texts->count >= texts->room && grow(texts)) return FAILED;
    slot = (Py_ssize_t)(hash & (uint64_t)(texts->room - 1));
    for (int probe = 0; probe < MOST_PROBES; probe++, slot = (slot + 1) & (texts->room - 1)) {
        Entry *entry = texts->entries + slot;
        if (!entry->text.start) {
            if (put(&texts->order, &text, sizeof(Span))) return FAILED;
            *entry = (Entry){text, hash, texts->count++, 0};
            *found = entry;
            return FINE;
        }
        if (entry->hash == hash && entry->text.size == text.size && same(entry->text.start, text.start, text.size)) {
            *found = entry;
            return FINE;
        }
    }
    return UNUSUAL;
}

/* -- fields of events ---------------------------------------------------------------------------------------------- */

typedef enum { INTEGER, NULLABLE, REAL, TEXT, RAW } Type;
typedef struct {
    const char *name;
    Type type;
    int slot; /* among the fields of this type; NULLABLE are integers */
} Field;

enum {
    EXTERNAL, SEQUENCE, FORWARD_THREAD, DEVICE, STREAM, CORRELATION, EXTERNAL_OLD, BYTES, REGISTERS, SHARED_BYTES, GRAPH,
    PYTHON_PARENT, PYTHON, PYTHON_MODULE, ON_STREAM, RECORD_CORRELATION, IN_ELEMENTS, OUT_ELEMENTS, GROUP_SIZE, SEQ,
    INTEGERS
};
enum { BLOCKS_PER_SM, WARPS_PER_SM, OCCUPANCY, REALS };
enum { STACK, MODULE, COLLECTIVE, DTYPE, GROUP, DESCRIPTION, CONCRETE, TYPES, DIMS, RANKS, SPANS };
enum { M_DEVICE_TYPE, M_DEVICE, M_ADDRESS, M_BYTES, M_ALLOCATED, M_RESERVED };

static const Field SLICE_ARGS[] = {
    {"External id", INTEGER, EXTERNAL}, {"Sequence number", INTEGER, SEQUENCE},
    {"Fwd thread id", INTEGER, FORWARD_THREAD}, {"device", INTEGER, DEVICE}, {"stream", INTEGER, STREAM},
    {"correlation", INTEGER, CORRELATION}, {"external id", INTEGER, EXTERNAL_OLD}, {"bytes", INTEGER, BYTES},
    {"blocks per SM", REAL, BLOCKS_PER_SM}, {"warps per SM", REAL, WARPS_PER_SM},
    {"est. achieved occupancy %", REAL, OCCUPANCY}, {"registers per thread", INTEGER, REGISTERS},
    {"shared memory", INTEGER, SHARED_BYTES}, {"graph id", INTEGER, GRAPH}, {"Concrete Inputs", RAW, CONCRETE},
    {"Input type", RAW, TYPES}, {"Input Dims", RAW, DIMS}, {"Call stack", TEXT, STACK},
    {"Module Hierarchy", TEXT, MODULE}, {"Python parent id", NULLABLE, PYTHON_PARENT}, {"Python id", INTEGER, PYTHON},
    {"Python module id", NULLABLE, PYTHON_MODULE}, {"wait_on_stream", INTEGER, ON_STREAM},
    {"wait_on_cuda_event_record_corr_id", INTEGER, RECORD_CORRELATION}, {"Collective name", TEXT, COLLECTIVE},
    {"In msg nelems", INTEGER, IN_ELEMENTS}, {"Out msg nelems", INTEGER, OUT_ELEMENTS}, {"Group size", INTEGER, GROUP_SIZE},
    {"dtype", TEXT, DTYPE}, {"Process Group Name", TEXT, GROUP}, {"Process Group Description", TEXT, DESCRIPTION},
    {"Process Group Ranks", RAW, RANKS}, {"Seq", INTEGER, SEQ}, {NULL, INTEGER, 0},
};
static const Field MEMORY_ARGS[] = {
    {"Device Type", INTEGER, M_DEVICE_TYPE}, {"Device Id", INTEGER, M_DEVICE}, {"Addr", INTEGER, M_ADDRESS},
    {"Bytes", INTEGER, M_BYTES}, {"Total Allocated", INTEGER, M_ALLOCATED}, {"Total Reserved", INTEGER, M_RESERVED},
    {NULL, INTEGER, 0},
};

enum { K_PH, K_CAT, K_NAME, K_PID, K_TID, K_TS, K_DUR, K_ARGS, K_ID };
static const Field EVENT_KEYS[] = {
    {"ph", RAW, K_PH}, {"cat", RAW, K_CAT}, {"name", RAW, K_NAME}, {"pid", RAW, K_PID}, {"tid", RAW, K_TID},
    {"ts", RAW, K_TS}, {"dur", RAW, K_DUR}, {"args", RAW, K_ARGS}, {"id", RAW, K_ID}, {NULL, RAW, 0},
};

#define LONGEST_KEY 40
typedef struct {
    const Field *fields;
    signed char first[LONGEST_KEY]; /* by length of the name; -1: none */
    signed char next[40];           /* of the same length */
} Fields;
static Fields OF_EVENTS, OF_SLICES, OF_MEMORY;

static void index_fields(Fields *index, const Field *fields) {
    index->fields = fields;
    memset(index->first, -1, sizeof index->first);
    for (int at = 0; fields[at].name; at++) {
        size_t size = strlen(fields[at].name);
        index->next[at] = index->first[size];
        index->first[size] = (signed char)at;
    }
}

static inline int field_of(const Fields *index, Cursor key, Py_ssize_t size) {
    int at = size < LONGEST_KEY ? index->first[size] : -1;
    while (at >= 0 && !same((Cursor)index->fields[at].name, key, size)) at = index->next[at];
    return at;
}

/* Events of a kind have the same keys in the same order, written in the same way.  A guess is what stood between two
   values (comma, key, colon) in the last event of the kind, and which field it was: the same bytes mean the same again.
   A wrong guess costs one comparison. */
typedef struct {
    Cursor start;
    int size, which;
} Guess;
#define MOST_GUESSES 32 /* keys of an object */
#define GUESSED_KINDS 32
typedef Guess Guesses[MOST_GUESSES];

enum { UNKNOWN_KEY = -1, LAST_KEY = -2 };

static Cursor read_key(Cursor at, Cursor end, Guess *guess, int first, const Fields *index, int *which) {
    Cursor start = at, key, after;
    int escaped;
    at = blank(at);
    if (*at == '}') {
        *which = LAST_KEY;
        return at + 1;
    }
    if (!first) {
        if (*at != ',') return NULL;
        at = blank(at + 1);
    }
    if (*at != '"') return NULL;
    key = at + 1;
    after = string_end(key, end, &escaped);
    if (!after || escaped) return NULL;
    *which = field_of(index, key, after - 1 - key);
    at = blank(after);
    if (*at != ':') return NULL;
    at = blank(at + 1);
    if (guess && at - start < 256) *guess = (Guess){start, (int)(at - start), *which};
    return at;
}

/* To the value of the next key of an object; past the object after its last. `at` is after `{` or a value. */
static inline Cursor next_value(Cursor at, Cursor end, Guess *guesses, int number, const Fields *index, int *which) {
    Guess *guess = number < MOST_GUESSES ? guesses + number : NULL;
    if (guess && guess->size && end - at >= guess->size && same(at, guess->start, guess->size)) {
        *which = guess->which;
        return blank(at + guess->size);
    }
    return read_key(at, end, guess, !number, index, which);
}

typedef struct {
    char phase; /* 0: unknown */
    int has_time, odd_id, has_args;
    Span name, category, pid, tid;
    int64_t start_ns, dur_ns, id;
    int64_t integers[INTEGERS];
    double reals[REALS];
    Span spans[SPANS];
} Event;

static const Span MISSING = {NULL, -1};

/* -- columns ------------------------------------------------------------------------------------------------------- */

/* (name, type as numpy writes it) */
#define COLUMNS(X) \
    X(start_ns, "i8") X(dur_ns, "i8") X(kind, "u1") X(name, "i4") X(thread, "i4") X(device, "i8") X(stream, "i8") \
    X(correlation, "i8") X(external, "i8") \
    X(kernel_row, "i4") X(occupancy, "f8") X(blocks_per_sm, "f8") X(warps_per_sm, "f8") X(registers, "i8") \
    X(shared_bytes, "i8") X(graph, "i8") \
    X(copy_row, "i4") X(copy_bytes, "i8") X(sync_row, "i4") X(on_stream, "i8") X(record_correlation, "i8") \
    X(op_row, "i4") X(dims, "i4") X(types, "i4") X(concrete, "i4") X(stack, "i4") X(module, "i4") X(sequence, "i8") \
    X(forward_thread, "i8") \
    X(python_row, "i4") X(python_id, "i8") X(python_parent, "i8") X(python_module, "i8") \
    X(collective_row, "i4") X(collective, "i4") X(group, "i4") X(description, "i4") X(ranks, "i4") X(dtype, "i4") \
    X(group_size, "i8") X(seq, "i8") X(in_elements, "i8") X(out_elements, "i8") \
    X(memory_ns, "i8") X(memory_thread, "i4") X(memory_device_type, "i8") X(memory_device, "i8") X(memory_bytes, "i8") \
    X(memory_allocated, "i8") X(memory_reserved, "i8") X(memory_address, "i8") \
    X(arrow_end, "u1") X(arrow_id, "i8") X(arrow_thread, "i4") X(arrow_ns, "i8") \
    X(metadata, "i8")
#define TABLES(X) \
    X(name) X(concrete) X(dims) X(types) X(stack) X(module) X(collective) X(group) X(description) X(ranks) X(dtype) \
    X(thread) X(memory_thread) X(arrow_thread)

/* The last threads that were met: most events are of few. */
typedef struct {
    Span pid, tid;
    int32_t number;
} Met;
#define MOST_MET 16

typedef struct {
    Cursor text;
    int64_t events;
    int32_t slices;
    PyObject *kinds, *settings;
    Texts categories;
    Column places; /* what texts of threads point to, in chunks that stay where they are */
#define X(name, type) Column name;
    struct { COLUMNS(X) } to;
#undef X
#define X(name) Texts name;
    struct { TABLES(X) } texts;
#undef X
    struct { Met thread[MOST_MET], memory_thread[MOST_MET], arrow_thread[MOST_MET]; } met;
    Guesses event_guesses[GUESSED_KINDS], slice_guesses[GUESSED_KINDS], memory_guesses[1];
} Scan;

#define TRY(call) do { Outcome outcome_ = (call); if (outcome_ != FINE) return outcome_; } while (0)
#define PUT(column, type, value) \
    do { type value_ = (type)(value); if (put(&scan->to.column, &value_, sizeof value_)) return FAILED; } while (0)

/* The number of a text in its table; -1 if it is missing or empty. */
static Outcome number_of(Texts *texts, Span text, Column *column) {
    int32_t number = -1;
    if (text.size > 0) {
        Entry *entry;
        TRY(find(texts, text, &entry));
        number = entry->number;
    }
    return put(column, &number, sizeof number) ? FAILED : FINE;
}
#define CODE(column, span) TRY(number_of(&scan->texts.column, (span), &scan->to.column))

/* Ask a mapping of Python for a small integer. */
static Outcome ask(PyObject *mapping, Span text, int32_t *answer) {
    PyObject *key, *value;
    long number;
    key = PyBytes_FromStringAndSize((const char *)text.start, text.size);
    if (!key) return FAILED;
    value = PyObject_GetItem(mapping, key);
    Py_DECREF(key);
    if (!value) return FAILED;
    number = PyLong_AsLong(value);
    Py_DECREF(value);
    if (number == -1 && PyErr_Occurred()) return FAILED;
    *answer = (int32_t)number;
    return FINE;
}

/* pid and tid as written, with a zero byte between them. */
static Outcome new_place(Scan *scan, Texts *texts, const Event *event, int32_t *number) {
    Span pid = event->pid, tid = event->tid, both;
    unsigned char text[2 * LONGEST_PLACE + 1];
    Entry *entry;
    int32_t before = texts->count;
    if (pid.size < 0) pid = (Span){(Cursor) "-1", 2};
    if (tid.size < 0) tid = (Span){(Cursor) "-1", 2};
    if (pid.size > LONGEST_PLACE || tid.size > LONGEST_PLACE) return UNUSUAL;
    memcpy(text, pid.start, (size_t)pid.size);
    text[pid.size] = 0;
    memcpy(text + pid.size + 1, tid.start, (size_t)tid.size);
    both = (Span){text, pid.size + 1 + tid.size};
    TRY(find(texts, both, &entry));
    if (texts->count > before) { /* new: give it a home that lasts */
        unsigned char *home = PyMem_Malloc((size_t)both.size);
        if (!home || put(&scan->places, &home, sizeof home)) {
            PyMem_Free(home);
            return FAILED;
        }
        memcpy(home, text, (size_t)both.size);
        entry->text.start = home;
        memcpy(texts->order.data + texts->order.size - sizeof(Span), &entry->text, sizeof(Span));
    }
    *number = entry->number;
    return FINE;
}

static inline Outcome place(Scan *scan, Texts *texts, Met *met, const Event *event, Column *column) {
    Span pid = event->pid, tid = event->tid;
    int32_t number;
    if (pid.size > 0 && tid.size > 0) {
        met += (pid.start[pid.size - 1] + 5 * tid.start[tid.size - 1]) & (MOST_MET - 1);
        if (met->pid.size != pid.size || met->tid.size != tid.size || !same(met->pid.start, pid.start, pid.size) ||
            !same(met->tid.start, tid.start, tid.size)) {
            TRY(new_place(scan, texts, event, &number));
            *met = (Met){pid, tid, number};
        }
        number = met->number;
    } else TRY(new_place(scan, texts, event, &number));
    return put(column, &number, sizeof number) ? FAILED : FINE;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

enum { OP = 1, ANNOTATION = 2, PYTHON_KIND = 3, KERNEL = 5, MEMCPY = 6, MEMSET = 7, SYNC = 8 }; /* Kind in columns.py */

static Outcome add_slice(Scan *scan, const Event *event) {
    const int64_t *is = event->integers;
    const Span *spans = event->spans;
    Span name = event->name.size < 0 ? (Span){scan->text, 0} : event->name;
    Span category = event->category;
    int32_t row = scan->slices++, kind = 0;
    Entry *named, *entry;
    if (category.size >= 0) {
        TRY(find(&scan->categories, category, &entry));
        if (!entry->flag) {
            TRY(ask(scan->kinds, category, &kind));
            entry->flag = kind + 1;
        }
        kind = entry->flag - 1;
    }
    TRY(find(&scan->texts.name, name, &named));
    PUT(start_ns, int64_t, event->start_ns);
    PUT(dur_ns, int64_t, event->dur_ns);
    PUT(kind, uint8_t, kind);
    PUT(name, int32_t, named->number);
    TRY(place(scan, &scan->texts.thread, scan->met.thread, event, &scan->to.thread));
    PUT(device, int64_t, is[DEVICE]);
    PUT(stream, int64_t, is[STREAM]);
    PUT(correlation, int64_t, is[CORRELATION]);
    PUT(external, int64_t, is[EXTERNAL] < 0 ? is[EXTERNAL_OLD] : is[EXTERNAL]);
    switch (kind) {
    case KERNEL:
        PUT(kernel_row, int32_t, row);
        PUT(occupancy, double, event->reals[OCCUPANCY]);
        PUT(blocks_per_sm, double, event->reals[BLOCKS_PER_SM]);
        PUT(warps_per_sm, double, event->reals[WARPS_PER_SM]);
        PUT(registers, int64_t, is[REGISTERS]);
        PUT(shared_bytes, int64_t, is[SHARED_BYTES]);
        PUT(graph, int64_t, is[GRAPH]);
        break;
    case MEMCPY: case MEMSET:
        PUT(copy_row, int32_t, row);
        PUT(copy_bytes, int64_t, is[BYTES]);
        break;
    case SYNC:
        PUT(sync_row, int32_t, row);
        PUT(on_stream, int64_t, is[ON_STREAM]);
        PUT(record_correlation, int64_t, is[RECORD_CORRELATION]);
        break;
    case OP: case ANNOTATION: {
        Span concrete = MISSING;
        if (spans[CONCRETE].size > 0) {
            if (!named->flag) {
                int32_t wanted;
                TRY(ask(scan->settings, name, &wanted));
                named->flag = wanted + 1;
            }
            if (named->flag == 2) concrete = spans[CONCRETE];
        }
        PUT(op_row, int32_t, row);
        CODE(concrete, concrete);
        CODE(dims, spans[DIMS]);
        CODE(types, spans[TYPES]);
        CODE(stack, spans[STACK]);
        CODE(module, spans[MODULE]);
        PUT(sequence, int64_t, is[SEQUENCE]);
        PUT(forward_thread, int64_t, is[FORWARD_THREAD]);
        break;
    }
    case PYTHON_KIND:
        PUT(python_row, int32_t, row);
        PUT(python_id, int64_t, is[PYTHON]);
        PUT(python_parent, int64_t, is[PYTHON_PARENT]);
        PUT(python_module, int64_t, is[PYTHON_MODULE]);
        break;
    default:
        break;
    }
    if (spans[COLLECTIVE].size > 0) {
        PUT(collective_row, int32_t, row);
        CODE(collective, spans[COLLECTIVE]);
        CODE(group, spans[GROUP]);
        CODE(description, spans[DESCRIPTION]);
        CODE(ranks, spans[RANKS]);
        CODE(dtype, spans[DTYPE]);
        PUT(group_size, int64_t, is[GROUP_SIZE]);
        PUT(seq, int64_t, is[SEQ]);
        PUT(in_elements, int64_t, is[IN_ELEMENTS]);
        PUT(out_elements, int64_t, is[OUT_ELEMENTS]);
    }
    return FINE;
}

static int is_text(Span span, const char *text) {
    return span.size == (Py_ssize_t)strlen(text) && same(span.start, (Cursor)text, span.size);
}

static Outcome add(Scan *scan, const Event *event, Cursor start, Cursor end) {
    const int64_t *is = event->integers;
    scan->events++;
    switch (event->phase) {
    case 'X':
        return event->has_time ? add_slice(scan, event) : UNUSUAL;
    case 'i': case 'I':
        if (!event->has_time) return UNUSUAL;
        if (!is_text(event->name, "[memory]")) return FINE;
        PUT(memory_ns, int64_t, event->start_ns);
        TRY(place(scan, &scan->texts.memory_thread, scan->met.memory_thread, event, &scan->to.memory_thread));
        PUT(memory_device_type, int64_t, is[M_DEVICE_TYPE]);
        PUT(memory_device, int64_t, is[M_DEVICE]);
        PUT(memory_bytes, int64_t, event->has_args && is[M_BYTES] != INT64_MIN ? is[M_BYTES] : 0);
        PUT(memory_allocated, int64_t, is[M_ALLOCATED]);
        PUT(memory_reserved, int64_t, is[M_RESERVED]);
        PUT(memory_address, int64_t, is[M_ADDRESS]);
        return FINE;
    case 's': case 'f':
        if (!event->has_time || event->odd_id) return UNUSUAL;
        if (!is_text(event->category, "fwdbwd")) return FINE;
        if (event->id < 0) return UNUSUAL;
        PUT(arrow_end, uint8_t, event->phase == 'f');
        PUT(arrow_id, int64_t, event->id);
        TRY(place(scan, &scan->texts.arrow_thread, scan->met.arrow_thread, event, &scan->to.arrow_thread));
        PUT(arrow_ns, int64_t, event->start_ns);
        return FINE;
    case 'M':
        PUT(metadata, int64_t, start - scan->text);
        PUT(metadata, int64_t, end - scan->text);
        return FINE;
    default: /* counters and the like, which no analysis uses */
        return FINE;
    }
}

/* Past the object; NULL if it is unusual. */
static Cursor read_args(Cursor at, Cursor end, Event *event, const Fields *index, Guess *guesses) {
    uint64_t seen = 0;
    int escaped;
    if (*at != '{') return NULL;
    at++;
    for (int number = 0;; number++) {
        Cursor after;
        const Field *field;
        int which;
        at = next_value(at, end, guesses, number, index, &which);
        if (!at || which == LAST_KEY) return at;
        if (which == UNKNOWN_KEY) {
            at = value_end(at, end, 0);
            if (!at) return NULL;
            continue;
        }
        field = index->fields + which;
        if (seen >> which & 1) return NULL;
        seen |= 1ULL << which;
        switch (field->type) {
        case NULLABLE:
            if (*at == 'n') {
                at = word_end(at, "null");
                break;
            }
            /* fall through */
        case INTEGER:
            at = integer(at, end, event->integers + field->slot);
            break;
        case REAL:
            at = *at == 'n' ? word_end(at, "null") : real(at, event->reals + field->slot);
            break;
        case TEXT:
            if (*at != '"') return NULL;
            after = string_end(at + 1, end, &escaped);
            if (!after) return NULL;
            event->spans[field->slot] = (Span){at + 1, after - at - 2};
            at = after;
            break;
        case RAW:
            after = value_end(at, end, 0);
            if (!after) return NULL;
            event->spans[field->slot] = (Span){at, after - at};
            at = after;
            break;
        }
        if (!at) return NULL;
    }
}

/* A process or thread: an integer or a string, as written. */
static Cursor read_place(Cursor at, Cursor end, Span *span) {
    int escaped;
    int64_t number;
    Cursor after = *at == '"' ? string_end(at + 1, end, &escaped) : integer(at, end, &number);
    if (!after || (*at == '"' && escaped)) return NULL;
    *span = (Span){at, after - at};
    return after;
}

static Cursor read_id(Cursor at, Cursor end, Event *event) {
    Cursor after = integer(at, end, &event->id);
    if (after) return after;
    event->id = -1;
    event->odd_id = *at != '"' && *at != 'n';
    return value_end(at, end, 0);
}

static const char IGNORED[] = "CbneSTpFtPNODRcVv(),";
static const char NAMED[] = "XiIsfM";

static void without_args(Event *event) {
    for (int slot = 0; slot < INTEGERS; slot++) event->integers[slot] = -1;
    for (int slot = 0; slot < REALS; slot++) event->reals[slot] = Py_NAN;
    for (int slot = 0; slot < SPANS; slot++) event->spans[slot] = MISSING;
}

/* Categories differ in their arguments; two of the same number only guess wrong more often. */
static inline unsigned guessed_kind(Span category) {
    if (category.size <= 0) return 0;
    return ((unsigned)category.size + category.start[0] + 4u * category.start[category.size - 1]) % GUESSED_KINDS;
}

static Cursor read_event(Scan *scan, Cursor at, Cursor end, Outcome *outcome) {
    Event event;
    Cursor start = at;
    unsigned seen = 0;
    int escaped;
    *outcome = UNUSUAL;
    if (*at != '{') return NULL;
    event.phase = 0;
    event.has_time = event.odd_id = event.has_args = 0;
    event.name = event.category = event.pid = event.tid = MISSING;
    event.dur_ns = 0;
    event.id = -1;
    at++;
    for (int number = 0;; number++) {
        Cursor after;
        int which;
        Guess *guesses = scan->event_guesses[(unsigned char)event.phase % GUESSED_KINDS];
        at = next_value(at, end, guesses, number, &OF_EVENTS, &which);
        if (!at) return NULL;
        if (which == LAST_KEY) break;
        if (which == UNKNOWN_KEY) {
            at = value_end(at, end, 0);
            if (!at) return NULL;
            continue;
        }
        if (seen >> which & 1) return NULL;
        seen |= 1u << which;
        switch (which) {
        case K_PH:
            if (at[0] != '"' || !PLAIN[at[1]] || at[2] != '"') return NULL;
            event.phase = (char)at[1];
            switch (event.phase) {
            case 'X': case 'i': case 'I':
                without_args(&event);
                break;
            default:
                if (!strchr(NAMED, event.phase) && !strchr(IGNORED, event.phase)) return NULL;
            }
            at += 3;
            break;
        case K_CAT:
            if (*at == 'n') {
                at = word_end(at, "null");
                break;
            }
            /* fall through */
        case K_NAME:
            if (*at != '"') return NULL;
            after = string_end(at + 1, end, &escaped);
            if (!after) return NULL;
            *(which == K_NAME ? &event.name : &event.category) = (Span){at + 1, after - at - 2};
            if (escaped && (which == K_CAT || event.phase != 'X')) return NULL;
            at = after;
            break;
        case K_PID: at = read_place(at, end, &event.pid); break;
        case K_TID: at = read_place(at, end, &event.tid); break;
        case K_TS: at = time_ns(at, end, &event.start_ns, 0); event.has_time = 1; break;
        case K_DUR: at = time_ns(at, end, &event.dur_ns, 1); break;
        case K_ID: at = read_id(at, end, &event); break;
        case K_ARGS:
            if (event.phase == 'X')
                at = read_args(at, end, &event, &OF_SLICES, scan->slice_guesses[guessed_kind(event.category)]);
            else if (event.phase == 'i' || event.phase == 'I') {
                event.integers[M_BYTES] = INT64_MIN;
                at = read_args(at, end, &event, &OF_MEMORY, scan->memory_guesses[0]);
            } else if (event.phase) at = value_end(at, end, 0);
            else return NULL;
            event.has_args = 1;
            break;
        }
        if (!at) return NULL;
    }
    if (!event.phase) return NULL;
    *outcome = add(scan, &event, start, at);
    return *outcome == FINE ? at : NULL;
}

static Outcome read_events(Scan *scan, Cursor at, Cursor end) {
    Outcome outcome;
    at = blank(at);
    if (*at != '[') return UNUSUAL;
    at = blank(at + 1);
    for (;;) {
        at = read_event(scan, at, end, &outcome);
        if (!at) return outcome;
        at = blank(at);
        if (*at == ']') break;
        if (*at != ',') return UNUSUAL;
        at = blank(at + 1);
    }
    return blank(at + 1) == end ? FINE : UNUSUAL;
}

/* -- what Python gets ---------------------------------------------------------------------------------------------- */

static int set_new(PyObject *dict, const char *name, PyObject *value) {
    int failed = !value || PyDict_SetItemString(dict, name, value);
    Py_XDECREF(value);
    return failed;
}

static PyObject *column_of(const Column *column, const char *type) {
    return Py_BuildValue("(y#s)", column->data ? column->data : "", column->size, type);
}

static PyObject *texts_of(const Texts *texts) {
    PyObject *list = PyList_New(texts->count);
    if (!list) return NULL;
    for (int32_t at = 0; at < texts->count; at++) {
        Span span;
        PyObject *text;
        memcpy(&span, texts->order.data + (size_t)at * sizeof span, sizeof span);
        text = PyBytes_FromStringAndSize((const char *)span.start, span.size);
        if (!text || PyList_SetItem(list, at, text)) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *result_of(const Scan *scan) {
    PyObject *columns = PyDict_New(), *texts = PyDict_New();
    if (!columns || !texts) goto failed;
#define X(name, type) if (scan->to.name.size && set_new(columns, #name, column_of(&scan->to.name, type))) goto failed;
    COLUMNS(X)
#undef X
#define X(name) if (scan->texts.name.count && set_new(texts, #name, texts_of(&scan->texts.name))) goto failed;
    TABLES(X)
#undef X
    return Py_BuildValue("(LNN)", (long long)scan->events, columns, texts);
failed:
    Py_XDECREF(columns);
    Py_XDECREF(texts);
    return NULL;
}

static void clear_texts(Texts *texts) {
    PyMem_Free(texts->entries);
    PyMem_Free(texts->order.data);
}

static PyObject *scan_text(PyObject *module, PyObject *args) {
    PyObject *text, *found = NULL;
    Scan scan;
    char *start;
    Py_ssize_t size;
    Outcome outcome;
    (void)module;
    memset(&scan, 0, sizeof scan);
    if (!PyArg_ParseTuple(args, "SOO", &text, &scan.kinds, &scan.settings)) return NULL;
    if (PyBytes_AsStringAndSize(text, &start, &size)) return NULL;
    if (size > INT32_MAX) Py_RETURN_NONE;
    scan.text = (Cursor)start;
    outcome = read_events(&scan, scan.text, scan.text + size);
    if (outcome == FINE) found = result_of(&scan);
    else if (outcome == FAILED && !PyErr_Occurred()) PyErr_NoMemory();
    else if (outcome == UNUSUAL) found = Py_NewRef(Py_None);
    for (Py_ssize_t at = 0; at < scan.places.size; at += (Py_ssize_t)sizeof(void *)) {
        void *home;
        memcpy(&home, scan.places.data + at, sizeof home);
        PyMem_Free(home);
    }
    PyMem_Free(scan.places.data);
    clear_texts(&scan.categories);
#define X(name, type) PyMem_Free(scan.to.name.data);
    COLUMNS(X)
#undef X
#define X(name) clear_texts(&scan.texts.name);
    TABLES(X)
#undef X
    return found;
}

static PyMethodDef METHODS[] = {
    {"scan", scan_text, METH_VARARGS,
     "scan(text, kinds, settings): (events, columns, texts) of a JSON array of events; None if it is unusual."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE_OF = {PyModuleDef_HEAD_INIT, "native_scan", NULL, 0, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_native_scan(void) {
    for (int c = 0x20; c < 0x80; c++) PLAIN[c] = c != '"' && c != '\\';
    index_fields(&OF_EVENTS, EVENT_KEYS);
    index_fields(&OF_SLICES, SLICE_ARGS);
    index_fields(&OF_MEMORY, MEMORY_ARGS);
    return PyModule_Create(&MODULE_OF);
}
