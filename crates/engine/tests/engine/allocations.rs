//! Counts the allocations of a thread while it is asked to, and always the bytes that it holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() {
    // Gone at the end of a thread: nobody counts there.
    let _ = ON.try_with(|on| {
        if on.get() {
            COUNT.with(|n| n.set(n.get() + 1));
        }
    });
}

fn add(bytes: i64) {
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches thread-local numbers only.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the caller keeps the contract of `GlobalAlloc`, which is the system's own.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        add(layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }
    // SAFETY: as above.
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        add(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
    // SAFETY: as above.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        add(size as i64 - layout.size() as i64);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Bytes that this thread took and did not give back.
pub fn live_bytes() -> i64 {
    LIVE.get()
}

/// Allocations of `work` on this thread, those under [`uncounted`] left out.
pub fn counted(work: impl FnOnce()) -> u64 {
    COUNT.set(0);
    ON.set(true);
    work();
    ON.set(false);
    COUNT.get()
}

/// Work of somebody else, in the middle of what is counted.
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let was = ON.replace(false);
    let result = work();
    ON.set(was);
    result
}
