//! When kernels began and when the kernels before them had ended, noted by kernels of builds with LONGWAVE_TIMELINE.
//!
//! Other builds have neither notes nor memory for them. The first block of a launch notes the GPU's clock, which ticks about thirty
//! times a microsecond; a step of one token becomes 2 to 3 % longer. Memory for the notes is never given back.

use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys;

use super::context::Context;
use super::error::{DriverError, check};

/// The latest notes that are kept.
const CAPACITY: usize = 1 << 17;
/// The counter and the notes, two words each.
const BYTES: usize = 16 * (1 + CAPACITY);

/// As `LongwaveTimeline` in common/timeline.cuh.
#[repr(C)]
struct Symbol {
    notes: u64,
    capacity: u32,
    module: u32,
}

/// Of every GPU its number, where its notes are, and the names of its modules.
static NOTES: Mutex<Vec<(u32, u64, Vec<&'static str>)>> = Mutex::new(Vec::new());

/// One note.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moment {
    /// The GPU's clock, nanoseconds.
    pub ns: u64,
    /// The file of the kernel.
    pub module: &'static str,
    /// Blocks of the launch in its first dimension.
    pub blocks: u32,
    /// The kernels before this one have ended; else it has begun.
    pub ready: bool,
}

/// Whether kernels were built to make notes.
const BUILT: bool = option_env!("LONGWAVE_TIMELINE_BUILT").is_some();

/// Tells a module that was just loaded where its notes go, if it makes any.
pub(super) fn attach(context: &Context, library: sys::CUlibrary, name: &'static str) -> Result<(), DriverError> {
    if !BUILT {
        return Ok(());
    }
    let symbol: &CStr = c"longwave_timeline";
    let (mut at, mut bytes) = (0, 0);
    // SAFETY: the library is loaded; writes two numbers.
    let found = unsafe { sys::cuLibraryGetGlobal(&mut at, &mut bytes, library, symbol.as_ptr()) };
    if found == sys::CUresult::CUDA_ERROR_NOT_FOUND {
        return Ok(());
    }
    check("cuLibraryGetGlobal", found, || format!("the timeline of {name}"))?;
    let gpu = context.gpu().index;
    let mut all = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let own = match all.iter().position(|(index, ..)| *index == gpu) {
        Some(own) => own,
        None => {
            let mut notes = 0;
            // SAFETY: writes one address.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&mut notes, BYTES) }, || "notes of a timeline".into())?;
            // SAFETY: as many bytes as were just allocated.
            check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(notes, 0, BYTES) }, || "notes of a timeline".into())?;
            all.push((gpu, notes, Vec::new()));
            all.len() - 1
        }
    };
    let (_, notes, names) = &mut all[own];
    let value = Symbol { notes: *notes, capacity: CAPACITY as u32, module: names.len() as u32 };
    names.push(name);
    assert_eq!(bytes, size_of::<Symbol>(), "the symbol of {name}");
    // SAFETY: the symbol has this size and form.
    let copied = unsafe { sys::cuMemcpyHtoD_v2(at, std::ptr::from_ref(&value).cast(), bytes) };
    check("cuMemcpyHtoD", copied, || format!("the timeline of {name}"))
}

/// The notes of the GPU of `context` since the last time, ascending; none from other builds. Nothing may run there meanwhile.
pub fn take(context: &Context) -> Result<Vec<Moment>, DriverError> {
    let all = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((_, notes, names)) = all.iter().find(|(index, ..)| *index == context.gpu().index) else {
        return Ok(Vec::new());
    };
    let mut words = vec![0u64; BYTES / 8];
    // SAFETY: as many bytes as were allocated there, and here.
    let copied = unsafe { sys::cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), *notes, BYTES) };
    check("cuMemcpyDtoH", copied, || "notes of a timeline".into())?;
    // SAFETY: as many bytes as were allocated there.
    check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(*notes, 0, BYTES) }, || "notes of a timeline".into())?;
    let count = (words[0] as u32 as usize).min(CAPACITY);
    let note = |note: &[u64]| Moment {
        ns: note[0],
        module: names[(note[1] >> 40) as usize],
        blocks: (note[1] >> 8) as u32,
        ready: note[1] & 255 == 1,
    };
    let mut moments: Vec<Moment> = words[2..2 + 2 * count].chunks_exact(2).map(note).collect();
    moments.sort_by_key(|moment| moment.ns);
    Ok(moments)
}
