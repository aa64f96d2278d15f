//! Errors of the driver: which call failed, what it was for, and the driver's own name for it.
//! Assumes nothing; an unknown code is printed as its number.

use std::ffi::CStr;

use cudarc::driver::sys;
use thiserror::Error;

/// A call of the driver that failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} failed for {what}: {name}")]
pub struct DriverError {
    /// Function of the driver.
    pub call: &'static str,
    /// What it was for: a kernel with its grid, a number of bytes.
    pub what: String,
    /// The driver's name for it, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
}

/// Turns a result into an error that says what the call was for.
pub(super) fn check(
    call: &'static str,
    result: sys::CUresult,
    what: impl FnOnce() -> String,
) -> Result<(), DriverError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the pointer receives a static string of the driver or stays null.
    let named = unsafe { sys::cuGetErrorName(result, &mut text) };
    let name = if named == sys::CUresult::CUDA_SUCCESS && !text.is_null() {
        // SAFETY: the driver gave a static C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("error {}", result as u32)
    };
    Err(DriverError { call, what: what(), name })
}
