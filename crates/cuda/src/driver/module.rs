//! Loaded cubins and their kernels.
//! A kernel lives as long as its module. Refuses a GPU for which no code was compiled.

use std::ffi::CString;
use std::rc::Rc;

use cudarc::driver::sys;

use super::context::Context;
use super::error::{DriverError, check};
use super::timeline;
use crate::cubins;

/// A cubin on a GPU.
#[derive(Clone)]
pub struct Module {
    library: Rc<Library>,
    name: &'static str,
}

struct Library {
    handle: sys::CUlibrary,
    /// Unloaded while its context still exists.
    context: Context,
}

impl Module {
    /// Loads the cubin `name` for the GPU of `context`.
    pub fn load(context: &Context, name: &str) -> Result<Module, DriverError> {
        let gpu = context.gpu();
        let cubin = cubins::find(name, gpu.major, gpu.minor).ok_or_else(|| DriverError {
            call: "looking for a kernel",
            what: format!("{name} on {} (compute capability {}.{})", gpu.name, gpu.major, gpu.minor),
            name: match cubins::CUBINS.is_empty() {
                true => "this program was built without kernels; run `cargo xtask cuda-toolkit` and build again".into(),
                false => "no code for this GPU".into(),
            },
        })?;
        let mut handle = std::ptr::null_mut();
        let none = std::ptr::null_mut();
        // SAFETY: the bytes are a static ELF file that the driver parses; there are no options.
        let result = unsafe {
            sys::cuLibraryLoadData(
                &mut handle,
                cubin.bytes.as_ptr().cast(),
                none,
                none.cast(),
                0,
                none.cast(),
                none.cast(),
                0,
            )
        };
        check("cuLibraryLoadData", result, || format!("{} for sm_{}", cubin.name, cubin.arch))?;
        let library = Rc::new(Library { handle, context: context.clone() });
        timeline::attach(context, handle, cubin.name)?;
        Ok(Module { library, name: cubin.name })
    }

    /// The kernel `name`, allowed to take `shared_bytes` of dynamic shared memory.
    pub fn kernel(&self, name: &'static str, shared_bytes: u32) -> Result<Kernel, DriverError> {
        let what = || format!("{name} in {}", self.name);
        let symbol = CString::new(name).expect("names of kernels have no zero");
        let (mut kernel, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the library is loaded; writes one handle.
        let result = unsafe { sys::cuLibraryGetKernel(&mut kernel, self.library.handle, symbol.as_ptr()) };
        check("cuLibraryGetKernel", result, what)?;
        // SAFETY: the kernel belongs to the current context; writes one handle.
        check("cuKernelGetFunction", unsafe { sys::cuKernelGetFunction(&mut function, kernel) }, what)?;
        // Code that came at its first launch would make that launch wait for the GPU, which may wait for another GPU.
        // SAFETY: a valid function of the current context.
        check("cuFuncLoad", unsafe { sys::cuFuncLoad(function) }, what)?;
        if shared_bytes > 48 << 10 {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: sets one number of a valid function.
            let result = unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32) };
            check("cuFuncSetAttribute", result, || format!("{} with {shared_bytes} bytes of shared memory", what()))?;
        }
        // A multiprocessor that changes how much of its memory is shared ends what runs on it first. So all kernels ask for the share
        // that attention needs (164 of 228 KiB on Hopper); with all of it the rest of the L1 is too small for weights that stream.
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: sets one number of a valid function.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, attribute, SHARED_PERCENT) }, what)?;
        Ok(Kernel { function, name, module: self.clone() })
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        let _ = self.context.synchronize();
        // SAFETY: no kernel of it runs any more and nobody holds it.
        let _ = unsafe { sys::cuLibraryUnload(self.handle) };
    }
}

/// The share of a multiprocessor's memory that kernels ask to be shared, in percent of the most.
const SHARED_PERCENT: i32 = 70;

/// A kernel that can be launched.
#[derive(Clone)]
pub struct Kernel {
    pub(super) function: sys::CUfunction,
    /// Its entry point.
    pub name: &'static str,
    #[allow(dead_code, reason = "keeps the code on the GPU")]
    module: Module,
}
