//! The process itself, under the names that all Prometheus clients use, from Linux' `/proc`.
//!
//! Read at a scrape. Assumes the kernel's unit of processor time, 1/100 s, which user space has seen on every platform for
//! decades. What cannot be read is left out.

use std::fs;

use super::families::Sheet;

/// Units of processor time in a second (`USER_HZ`).
const TICKS_PER_S: f64 = 100.0;

/// Adds what can be read.
pub(super) fn fill(sheet: &mut Sheet) {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (stat, status) = (read("/proc/self/stat"), read("/proc/self/status"));
    let mut gauge = |name: &str, help: &str, value: Option<f64>| {
        if let Some(value) = value {
            sheet.gauge(name, help, value);
        }
    };
    gauge("process_resident_memory_bytes", "Resident memory.", kilobytes(&status, "VmRSS"));
    gauge("process_virtual_memory_bytes", "Address space.", kilobytes(&status, "VmSize"));
    gauge("process_threads", "Threads.", line(&status, "Threads"));
    let open = fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as f64);
    gauge("process_open_fds", "Open file descriptors.", open);
    let limits = read("/proc/self/limits");
    let most =
        limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse().ok());
    gauge("process_max_fds", "Most open file descriptors.", most);
    let booted = line(&read("/proc/stat"), "btime");
    let started = booted.zip(field(&stat, 22)).map(|(booted, ticks)| booted + ticks / TICKS_PER_S);
    gauge("process_start_time_seconds", "Start, Unix seconds.", started);
    if let Some((user, system)) = field(&stat, 14).zip(field(&stat, 15)) {
        let seconds = (user + system) / TICKS_PER_S;
        sheet.counters("process_cpu_seconds_total", "Processor time, user and system.", &[(&[], seconds)]);
    }
}

/// A field of `/proc/self/stat`, counted from 1 as in its manual. The second one is the program's name in brackets, which
/// may hold spaces.
fn field(stat: &str, number: usize) -> Option<f64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(number - 3)?.parse().ok()
}

/// The number behind a name.
fn line(text: &str, name: &str) -> Option<f64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim_start_matches(':').split_whitespace().next()?.parse().ok()
}

fn kilobytes(text: &str, name: &str) -> Option<f64> {
    line(text, name).map(|kilobytes| kilobytes * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_behind_the_name() {
        let stat = "7 (a name) 1) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 3 0 12345 0 0";
        assert_eq!((field(stat, 14), field(stat, 15), field(stat, 22)), (Some(250.0), Some(50.0), Some(12345.0)));
        assert_eq!(field("", 14), None);
        let status = "Name:\tx\nVmRSS:\t  2048 kB\nThreads:\t9\n";
        assert_eq!((kilobytes(status, "VmRSS"), line(status, "Threads")), (Some(2_097_152.0), Some(9.0)));
        assert_eq!(line("cpu 1\nbtime 1700000000\n", "btime"), Some(1_700_000_000.0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn this_process_can_be_read() {
        let mut sheet = Sheet::new(&[]);
        fill(&mut sheet);
        assert_eq!(sheet.families().len(), 7);
    }
}
