/* The hooks around ordinary calls in C: an optional part of Stepscope (see native.py).

   What the hooks in Python do in an ordinary step (write a word, call the original, write another word, end the step) is
   done here without their bytecode.  Whatever is not ordinary (a timed device, a sampled step, a closure, another thread,
   an observer or a check that is due, a search for the model) is left to the hook in Python: each hook here has that
   hook beside it, decides first, and calls it before it has changed anything.

   The fields that both use are here: LedgerFields is the base of a ledger, StepFields of a recorder (native.py).  Nothing
   is copied between them, so hooks in Python and in C can take turns within a step.

   Memory: a ledger holds buffers of the ring, so that nobody can unmap it below a hook (closing the map raises
   BufferError instead), and every word is stored at an index that was compared with the length of the buffer.

   Threads: the GIL is held from the first check to the last word, except in calls of Python, and after each of those
   every field is read again.  An interpreter without a GIL does not load this file (hatch_build.py does not build it
   there, and native.py does not use it).

   ABI: the limited API of Python 3.10.  Buffers are in that API from 3.11 on, but 3.10 has the same functions with the
   same structure, so they are declared below. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* native.py compares these with ring/layout.py and records/steps.py, and does not use a build that differs. */
enum { TIME_SHIFT = 5, ENTER = 16, STEP_END = 16, TURN_WORDS = 256, RESERVE_WORDS = 4 * TURN_WORDS, HEAD_WORD = 7 };
enum { TAG_SHIFT = 55, STEP_ABOUT = 2, WRAP = 11, STEP_SHIFT = 20, PHASE_SHIFT = 16 };
enum { NOT_NOW = -1, IN_TRAINING_MODE = 1 };
#define DATA (1ULL << 63)

static PyTypeObject *LEDGER_TYPE, *STEP_TYPE;
static PyObject *TRAINING, *DUE, *SOLE;

/* -- Buffers ------------------------------------------------------------------------------------------------------- */

typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    char *format;
    Py_ssize_t *shape, *strides, *suboffsets;
    void *internal;
} Buffer; /* Py_buffer */

extern int PyObject_GetBuffer(PyObject *, void *, int);
extern void PyBuffer_Release(void *);
enum { WRITABLE = 1 }; /* PyBUF_WRITABLE */

/* Words in memory, and who keeps them there. */
typedef struct {
    PyObject *owner; /* as Python sees it: a memoryview */
    uint64_t *words; /* NULL: nothing to write to */
    long long count;
    Buffer buffer;
} Memory;

static void release(Memory *memory) {
    PyObject *owner = memory->owner;
    memory->words = NULL;
    memory->count = 0;
    memory->owner = NULL;
    if (memory->buffer.obj != NULL) PyBuffer_Release(&memory->buffer);
    Py_XDECREF(owner);
}

static int acquire(Memory *memory, PyObject *owner) {
    Memory found = {0};
    if (PyObject_GetBuffer(owner, &found.buffer, 0)) return -1;
    if (!found.buffer.readonly && (uintptr_t)found.buffer.buf % sizeof(uint64_t) == 0) {
        found.words = found.buffer.buf;
        found.count = found.buffer.len / (Py_ssize_t)sizeof(uint64_t);
    }
    Py_INCREF(owner);
    found.owner = owner;
    Memory before = *memory;
    *memory = found;
    release(&before);
    return 0;
}

/* -- The fields of a ledger ---------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Memory body, header;
    long long at, limit, rounds, capacity;
    int phase;
    unsigned long thread; /* 0: nobody */
    PyObject *device, *before_backward;
} Ledger;

static inline long long now_ns(void) {
    struct timespec now; /* the clock of time.perf_counter_ns */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static inline void put(Ledger *l, long long at, uint64_t word) {
    if (at >= 0 && at < l->body.count) __atomic_store_n(&l->body.words[at], word, __ATOMIC_RELAXED);
}

static inline void publish(Ledger *l, long long at) {
    if (l->header.count > HEAD_WORD)
        __atomic_store_n(&l->header.words[HEAD_WORD], (uint64_t)(l->rounds + at), __ATOMIC_RELEASE);
}

static inline void change(Ledger *l, int phase, int code) {
    put(l, l->at, ((uint64_t)now_ns() << TIME_SHIFT) + (uint64_t)code);
    l->at++;
    l->phase = phase;
}

/* As LedgerMethods.turn. */
static void turn(Ledger *l) {
    if (l->at > l->capacity - RESERVE_WORDS) {
        put(l, l->at, DATA | (uint64_t)WRAP << TAG_SHIFT);
        l->rounds += l->capacity;
        l->at = 0;
    }
    l->limit = l->at + TURN_WORDS;
    publish(l, l->at);
}

static inline int is_set(PyObject *object) { return object != NULL && object != Py_None; }

/* Whether a phase may begin here: on the thread that trains, while no device is timed, with room for its words. */
static inline int is_ordinary(Ledger *l) {
    return PyThread_get_thread_ident() == l->thread && !is_set(l->device) && l->at >= 0 && l->at < l->body.count - 4;
}

/* A phase ends, after a call that maybe raised.  Returns the result of the call. */
static PyObject *leave(Ledger *l, int outer, PyObject *result) {
    int ended = l->phase;
    long long at = l->at;
    change(l, outer, outer);
    if (is_set(l->device)) { /* only since the phase began, or it would have begun in Python */
        PyObject *type, *value, *trace, *marked, *device = l->device;
        PyErr_Fetch(&type, &value, &trace);
        Py_INCREF(device);
        marked = PyObject_CallMethod(device, "mark", "ii", ended, outer);
        Py_DECREF(device);
        if (marked == NULL) {
            Py_CLEAR(result);
            Py_XDECREF(type);
            Py_XDECREF(value);
            Py_XDECREF(trace);
        } else {
            Py_DECREF(marked);
            PyErr_Restore(type, value, trace);
        }
    }
    if (at > l->limit) turn(l);
    return result;
}

/* As LedgerMethods.enter and .leave, which do what is not ordinary. */
static PyObject *ledger_enter(PyObject *self, PyObject *argument) {
    Ledger *l = (Ledger *)self;
    int outer, phase = (int)PyLong_AsLong(argument);
    if (phase == -1 && PyErr_Occurred()) return NULL;
    outer = l->phase;
    if (outer == phase) return PyLong_FromLong(NOT_NOW);
    if (!is_ordinary(l)) return PyObject_CallMethod(self, "_enter", "O", argument);
    change(l, phase, phase + ENTER);
    return PyLong_FromLong(outer);
}

static PyObject *ledger_leave(PyObject *self, PyObject *argument) {
    Ledger *l = (Ledger *)self;
    long long at;
    int outer = (int)PyLong_AsLong(argument);
    if (outer == -1 && PyErr_Occurred()) return NULL;
    if (is_set(l->device)) return PyObject_CallMethod(self, "_leave", "O", argument);
    at = l->at;
    change(l, outer, outer);
    if (at > l->limit) turn(l);
    Py_RETURN_NONE;
}

static PyObject *get_memory(PyObject *self, void *offset) {
    Memory *memory = (Memory *)((char *)self + (Py_ssize_t)(intptr_t)offset);
    PyObject *owner = memory->owner == NULL ? Py_None : memory->owner;
    Py_INCREF(owner);
    return owner;
}

static int set_memory(PyObject *self, PyObject *owner, void *offset) {
    Memory *memory = (Memory *)((char *)self + (Py_ssize_t)(intptr_t)offset);
    if (owner == NULL) {
        PyErr_SetString(PyExc_TypeError, "cannot be deleted");
        return -1;
    }
    return acquire(memory, owner);
}

static int ledger_traverse(PyObject *self, visitproc visit, void *arg) {
    Ledger *l = (Ledger *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(l->device);
    Py_VISIT(l->before_backward);
    Py_VISIT(l->body.owner);
    Py_VISIT(l->header.owner);
    return 0;
}

static int ledger_clear(PyObject *self) {
    Ledger *l = (Ledger *)self;
    Py_CLEAR(l->device);
    Py_CLEAR(l->before_backward);
    release(&l->body);
    release(&l->header);
    return 0;
}

/* Of an object, maybe of a subclass in Python, which has then released what it added. */
static void deallocate(PyObject *self, inquiry clear) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void ledger_dealloc(PyObject *self) { deallocate(self, ledger_clear); }

static PyMemberDef LEDGER_MEMBERS[] = {
    {"at", T_LONGLONG, offsetof(Ledger, at), 0, NULL},
    {"limit", T_LONGLONG, offsetof(Ledger, limit), 0, NULL},
    {"rounds", T_LONGLONG, offsetof(Ledger, rounds), 0, NULL},
    {"_capacity", T_LONGLONG, offsetof(Ledger, capacity), 0, NULL},
    {"phase", T_INT, offsetof(Ledger, phase), 0, NULL},
    {"thread", T_ULONG, offsetof(Ledger, thread), 0, NULL},
    {"device", T_OBJECT, offsetof(Ledger, device), 0, NULL},
    {"before_backward", T_OBJECT, offsetof(Ledger, before_backward), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef LEDGER_GETTERS[] = {
    {"body", get_memory, set_memory, NULL, (void *)(intptr_t)offsetof(Ledger, body)},
    {"header", get_memory, set_memory, NULL, (void *)(intptr_t)offsetof(Ledger, header)},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef LEDGER_METHODS[] = {
    {"enter", ledger_enter, METH_O, "Begin a phase inside the current one, which is returned."},
    {"leave", ledger_leave, METH_O, "Return to the phase before ``enter``."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot LEDGER_SLOTS[] = {
    {Py_tp_traverse, ledger_traverse}, {Py_tp_clear, ledger_clear},    {Py_tp_dealloc, ledger_dealloc},
    {Py_tp_members, LEDGER_MEMBERS},   {Py_tp_getset, LEDGER_GETTERS}, {Py_tp_methods, LEDGER_METHODS},
    {0, NULL},
};
static PyType_Spec LEDGER_SPEC = {
    "stepscope.recorder.hooks.native_hooks.LedgerFields", sizeof(Ledger), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, LEDGER_SLOTS,
};

/* -- The fields of a recorder -------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    long long step, flags, attend_at, ended_ns, slow_ns, optimizer_returns;
    char forward_seen, is_explicit, searching;
    PyObject *trail, *boundaries;
} Steps;

static int steps_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Steps *)self)->trail);
    Py_VISIT(((Steps *)self)->boundaries);
    return 0;
}

static int steps_clear(PyObject *self) {
    Py_CLEAR(((Steps *)self)->trail);
    Py_CLEAR(((Steps *)self)->boundaries);
    return 0;
}

static void steps_dealloc(PyObject *self) { deallocate(self, steps_clear); }

static PyMemberDef STEP_MEMBERS[] = {
    {"step", T_LONGLONG, offsetof(Steps, step), 0, NULL},
    {"flags", T_LONGLONG, offsetof(Steps, flags), 0, NULL},
    {"_attend_at", T_LONGLONG, offsetof(Steps, attend_at), 0, NULL},
    {"_ended_ns", T_LONGLONG, offsetof(Steps, ended_ns), 0, NULL},
    {"_slow_ns", T_LONGLONG, offsetof(Steps, slow_ns), 0, NULL},
    {"optimizer_returns", T_LONGLONG, offsetof(Steps, optimizer_returns), 0, NULL},
    {"forward_seen", T_BOOL, offsetof(Steps, forward_seen), 0, NULL},
    {"explicit", T_BOOL, offsetof(Steps, is_explicit), 0, NULL},
    {"searching", T_BOOL, offsetof(Steps, searching), 0, NULL},
    {"trail", T_OBJECT, offsetof(Steps, trail), 0, NULL},
    {"boundaries", T_OBJECT, offsetof(Steps, boundaries), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot STEP_SLOTS[] = {
    {Py_tp_traverse, steps_traverse}, {Py_tp_clear, steps_clear}, {Py_tp_dealloc, steps_dealloc},
    {Py_tp_members, STEP_MEMBERS},    {0, NULL},
};
static PyType_Spec STEP_SPEC = {
    "stepscope.recorder.hooks.native_hooks.StepFields", sizeof(Steps), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, STEP_SLOTS,
};

/* -- Hooks --------------------------------------------------------------------------------------------------------- */

enum { TIMED, FORWARD, BEFORE_STEP, AFTER_STEP, KINDS };

typedef struct {
    PyObject_HEAD
    int kind, phase;
    Ledger *ledger;
    Steps *steps;     /* NULL: a TIMED hook without an observer */
    PyObject *python; /* the hook in Python */
    /* TIMED: the original, an observer or None.  FORWARD: the original, None, roots, frozen, is_grad_enabled.
       BEFORE_STEP and AFTER_STEP: the optimizers' steps that are under way. */
    PyObject *original, *observer, *roots, *frozen, *grad_enabled;
} Hook;

/* An attribute that is a number; if that fails, a number that makes the caller leave everything to Python. */
static long long number_of(PyObject *object, PyObject *name, long long otherwise) {
    PyObject *found = PyObject_GetAttr(object, name);
    long long value = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return otherwise;
    }
    return value;
}

/* The hook with its ledger stays alive during a call, which may remove it from where it is. */
static PyObject *call_inside(Hook *h, PyObject *values, PyObject *names) {
    Ledger *l = h->ledger;
    PyObject *result, *original = h->original;
    int outer = l->phase;
    Py_INCREF(l);
    Py_INCREF(original);
    change(l, h->phase, h->phase + ENTER);
    result = leave(l, outer, PyObject_Call(original, values, names));
    Py_DECREF(original);
    Py_DECREF(l);
    return result;
}

static PyObject *timed(Hook *h, PyObject *values, PyObject *names) {
    Ledger *l = h->ledger;
    if (l->phase == h->phase) return PyObject_Call(h->original, values, names);
    if (is_set(h->observer) &&
        (is_set(l->before_backward) || h->steps->step >= number_of(h->observer, DUE, LLONG_MIN)))
        return PyObject_Call(h->python, values, names);
    if (!is_ordinary(l)) return PyObject_Call(h->python, values, names);
    return call_inside(h, values, names);
}

/* Whether a module is a model that is trained now: 1, a module that is none: 0, to be decided in Python: -1. */
static int trains(Hook *h, PyObject *module) {
    PyObject *key, *root, *inside, *mode;
    long how;
    int known;
    if (h->steps->searching) return -1;
    mode = PyObject_CallNoArgs(h->grad_enabled);
    Py_XDECREF(mode);
    if (mode != Py_True) goto unknown;
    key = PyLong_FromVoidPtr(module);
    if (key == NULL) goto unknown;
    root = PyDict_GetItemWithError(h->roots, key);
    Py_XINCREF(root);
    Py_DECREF(key);
    if (root == NULL) {
        if (PyErr_Occurred() || PyDict_Size(h->frozen) != 0) goto unknown;
        return 0;
    }
    known = PyTuple_Check(root) && PyTuple_Size(root) == 2;
    how = known ? PyLong_AsLong(PyTuple_GetItem(root, 0)) : -1;
    inside = known ? PyTuple_GetItem(root, 1) : NULL;
    if (how != IN_TRAINING_MODE || inside == NULL) {
        Py_DECREF(root);
        goto unknown;
    }
    if (inside == Py_None)
        Py_INCREF(inside);
    else
        inside = PyObject_CallNoArgs(inside); /* a weak reference */
    Py_DECREF(root);
    if (inside == NULL) goto unknown;
    mode = PyObject_GetAttr(inside == Py_None ? module : inside, TRAINING);
    Py_DECREF(inside);
    Py_XDECREF(mode);
    if (mode == Py_True) return 1;
unknown:
    PyErr_Clear();
    return -1;
}

static PyObject *forward(Hook *h, PyObject *values, PyObject *names) {
    int training = PyTuple_Size(values) > 0 ? trains(h, PyTuple_GetItem(values, 0)) : -1;
    if (training < 0 || !is_ordinary(h->ledger)) return PyObject_Call(h->python, values, names);
    if (!training) return PyObject_Call(h->original, values, names);
    h->steps->forward_seen = 1;
    if (h->ledger->phase == h->phase) return PyObject_Call(h->original, values, names);
    return call_inside(h, values, names);
}

/* Whether gradients may be read in this step. */
static int trail_is_due(Steps *s) {
    PyObject *trail = s->trail;
    int due;
    if (!is_set(trail)) return 0;
    Py_INCREF(trail);
    due = s->step >= number_of(trail, DUE, LLONG_MIN);
    Py_DECREF(trail);
    return due;
}

/* Called with the optimizer, and the arguments of its step: (optimizer,) and {} if there is no closure. */
static PyObject *before_step(Hook *h, PyObject *values, PyObject *names) {
    Ledger *l = h->ledger;
    PyObject *given, *named, *entry;
    if (names != NULL || PyTuple_Size(values) != 3) return PyObject_Call(h->python, values, names);
    given = PyTuple_GetItem(values, 1);
    named = PyTuple_GetItem(values, 2);
    if (!PyTuple_Check(given) || PyTuple_Size(given) > 1 || !PyDict_Check(named) || PyDict_Size(named) != 0 ||
        trail_is_due(h->steps) || PyList_Size(h->original) != 0 || l->phase == h->phase || !is_ordinary(l))
        return PyObject_Call(h->python, values, names);
    entry = Py_BuildValue("(Ni)", PyLong_FromVoidPtr(PyTuple_GetItem(values, 0)), l->phase);
    if (entry == NULL || PyList_Append(h->original, entry)) {
        Py_XDECREF(entry);
        PyErr_Clear();
        return PyObject_Call(h->python, values, names);
    }
    Py_DECREF(entry);
    change(l, h->phase, h->phase + ENTER);
    Py_RETURN_NONE;
}

/* Whether the optimizer is the only one, so that each of its steps ends a step of the training. */
static int ends_steps(Steps *s, PyObject *optimizer) {
    PyObject *boundaries = s->boundaries, *sole;
    void *known;
    if (boundaries == NULL) return 0;
    Py_INCREF(boundaries);
    sole = PyObject_GetAttr(boundaries, SOLE);
    Py_DECREF(boundaries);
    known = sole == NULL ? NULL : PyLong_AsVoidPtr(sole);
    Py_XDECREF(sole);
    if (known == NULL && PyErr_Occurred()) PyErr_Clear();
    return known == optimizer;
}

/* The fast path of Recorder.end_step.  Called with the optimizer and two arguments that are of no interest. */
static PyObject *after_step(Hook *h, PyObject *values, PyObject *names) {
    Ledger *l = h->ledger;
    Steps *s = h->steps;
    PyObject *entry;
    long long at, ended_ns;
    long outer;
    if (names != NULL || PyTuple_Size(values) != 3 || s->is_explicit || !s->forward_seen ||
        s->step >= s->attend_at || !ends_steps(s, PyTuple_GetItem(values, 0)) || PyList_Size(h->original) != 1)
        return PyObject_Call(h->python, values, names);
    entry = PyList_GetItem(h->original, 0);
    outer = PyTuple_Check(entry) && PyTuple_Size(entry) == 2 ? PyLong_AsLong(PyTuple_GetItem(entry, 1)) : NOT_NOW;
    if (outer < 0) {
        PyErr_Clear();
        return PyObject_Call(h->python, values, names);
    }
    ended_ns = now_ns();
    if (!is_ordinary(l) || ended_ns - s->ended_ns >= s->slow_ns) return PyObject_Call(h->python, values, names);
    if (PyList_SetSlice(h->original, 0, 1, NULL)) {
        PyErr_Clear();
        return PyObject_Call(h->python, values, names);
    }
    at = l->at;
    s->optimizer_returns++;
    put(l, at, ((uint64_t)ended_ns << TIME_SHIFT) + STEP_END);
    put(l, at + 1,
        DATA | (uint64_t)STEP_ABOUT << TAG_SHIFT | (uint64_t)s->step << STEP_SHIFT | (uint64_t)outer << PHASE_SHIFT |
            (uint64_t)s->flags);
    l->phase = (int)outer;
    l->at = at + 2;
    s->step++;
    s->flags = s->forward_seen = 0;
    s->ended_ns = ended_ns;
    if (at > l->limit)
        turn(l);
    else
        publish(l, at + 2);
    Py_RETURN_NONE;
}

static PyObject *hook_call(PyObject *self, PyObject *values, PyObject *names) {
    static PyObject *(*const KIND[KINDS])(Hook *, PyObject *, PyObject *) = {timed, forward, before_step, after_step};
    Hook *h = (Hook *)self;
    PyObject *result;
    if (h->python == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this hook was destroyed");
        return NULL;
    }
    Py_INCREF(self);
    result = KIND[h->kind](h, values, names);
    Py_DECREF(self);
    return result;
}

/* Hook(kind, ledger, recorder, original, python, phase, observer, roots, frozen, is_grad_enabled) */
static int hook_init(PyObject *self, PyObject *args, PyObject *names) {
    Hook *h = (Hook *)self;
    PyObject *ledger, *steps, *original, *python, *observer, *roots, *frozen, *grad_enabled;
    int kind, phase;
    (void)names;
    if (!PyArg_ParseTuple(args, "iO!OOOiOOOO", &kind, LEDGER_TYPE, &ledger, &steps, &original, &python, &phase, &observer,
                          &roots, &frozen, &grad_enabled))
        return -1;
    if (h->python != NULL || kind < 0 || kind >= KINDS || !PyCallable_Check(python) ||
        (steps == Py_None ? kind != TIMED || observer != Py_None : !PyObject_TypeCheck(steps, STEP_TYPE)) ||
        (kind >= BEFORE_STEP ? !PyList_Check(original) : !PyCallable_Check(original)) ||
        (kind == FORWARD && !(PyDict_Check(roots) && PyDict_Check(frozen)))) {
        PyErr_SetString(PyExc_TypeError, "not the arguments of a hook");
        return -1;
    }
    h->kind = kind;
    h->phase = phase;
    h->ledger = (Ledger *)ledger;
    h->steps = steps == Py_None ? NULL : (Steps *)steps;
    h->original = original;
    h->python = python;
    h->observer = observer;
    h->roots = roots;
    h->frozen = frozen;
    h->grad_enabled = grad_enabled;
    Py_INCREF(ledger);
    Py_XINCREF((PyObject *)h->steps);
    Py_INCREF(original);
    Py_INCREF(python);
    Py_INCREF(observer);
    Py_INCREF(roots);
    Py_INCREF(frozen);
    Py_INCREF(grad_enabled);
    return 0;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
    Hook *h = (Hook *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)h->ledger);
    Py_VISIT((PyObject *)h->steps);
    Py_VISIT(h->python);
    Py_VISIT(h->original);
    Py_VISIT(h->observer);
    Py_VISIT(h->roots);
    Py_VISIT(h->frozen);
    Py_VISIT(h->grad_enabled);
    return 0;
}

static int hook_clear(PyObject *self) {
    Hook *h = (Hook *)self;
    Py_CLEAR(h->python);
    Py_CLEAR(h->ledger);
    Py_CLEAR(h->steps);
    Py_CLEAR(h->original);
    Py_CLEAR(h->observer);
    Py_CLEAR(h->roots);
    Py_CLEAR(h->frozen);
    Py_CLEAR(h->grad_enabled);
    return 0;
}

static void hook_dealloc(PyObject *self) { deallocate(self, hook_clear); }

static PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_init, hook_init},       {Py_tp_call, hook_call},     {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},     {Py_tp_dealloc, hook_dealloc}, {0, NULL},
};
static PyType_Spec HOOK_SPEC = {
    "stepscope.recorder.hooks.native_hooks.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, HOOK_SLOTS,
};

/* -- Module -------------------------------------------------------------------------------------------------------- */

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "native_hooks", NULL, -1, NULL, NULL, NULL, NULL, NULL};

static int intern_names(void) {
    static const struct {
        PyObject **to;
        const char *name;
    } NAMES[] = {
        {&TRAINING, "training"},
        {&DUE, "due"},
        {&SOLE, "sole"},
    };
    for (size_t at = 0; at < sizeof NAMES / sizeof *NAMES; at++)
        if ((*NAMES[at].to = PyUnicode_InternFromString(NAMES[at].name)) == NULL) return -1;
    return 0;
}

static int fill(PyObject *module) {
    PyObject *hook = PyType_FromSpec(&HOOK_SPEC), *layout;
    int failed;
    LEDGER_TYPE = (PyTypeObject *)PyType_FromSpec(&LEDGER_SPEC); /* these two for the life of the process */
    STEP_TYPE = (PyTypeObject *)PyType_FromSpec(&STEP_SPEC);
    layout = Py_BuildValue("(iiiiiiiiiii)", TIME_SHIFT, ENTER, STEP_END, TURN_WORDS, RESERVE_WORDS, HEAD_WORD, TAG_SHIFT,
                           STEP_ABOUT, WRAP, NOT_NOW, IN_TRAINING_MODE);
    failed = hook == NULL || LEDGER_TYPE == NULL || STEP_TYPE == NULL || layout == NULL || intern_names() ||
             PyModule_AddObjectRef(module, "LedgerFields", (PyObject *)LEDGER_TYPE) ||
             PyModule_AddObjectRef(module, "StepFields", (PyObject *)STEP_TYPE) ||
             PyModule_AddObjectRef(module, "Hook", hook) || PyModule_AddObjectRef(module, "LAYOUT", layout) ||
             PyModule_AddIntConstant(module, "INTERFACE", 1) || PyModule_AddIntConstant(module, "TIMED", TIMED) ||
             PyModule_AddIntConstant(module, "FORWARD", FORWARD) ||
             PyModule_AddIntConstant(module, "BEFORE_STEP", BEFORE_STEP) ||
             PyModule_AddIntConstant(module, "AFTER_STEP", AFTER_STEP);
    Py_XDECREF(hook);
    Py_XDECREF(layout);
    return failed;
}

PyMODINIT_FUNC PyInit_native_hooks(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && fill(module)) Py_CLEAR(module);
    return module;
}
