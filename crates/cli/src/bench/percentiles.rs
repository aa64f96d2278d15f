//! Distributions in few numbers, computed as numpy does (linear between neighbours), so that they compare with those of
//! other tools. Assumes finite values; no value at all gives `None`.

/// A distribution.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// In rising order.
    pub sorted: Vec<f64>,
    /// Arithmetic mean.
    pub mean: f64,
    /// Standard deviation of these values, not of a population that they were drawn from.
    pub std: f64,
}

impl Distribution {
    /// Of at least one value.
    pub fn of(mut values: Vec<f64>) -> Option<Distribution> {
        if values.is_empty() {
            return None;
        }
        values.sort_by(f64::total_cmp);
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / count;
        Some(Distribution { sorted: values, mean, std: variance.sqrt() })
    }

    /// The value that `percent` of them do not exceed, 0 to 100.
    pub fn at(&self, percent: f64) -> f64 {
        let place = percent / 100.0 * (self.sorted.len() - 1) as f64;
        let (low, high) = (place.floor() as usize, place.ceil() as usize);
        self.sorted[low] + (self.sorted[high] - self.sorted[low]) * place.fract()
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        self.at(50.0)
    }
}

/// Reads percentiles as `50,90,99.9`.
pub fn percent(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(value) if (0.0..=100.0).contains(&value) => Ok(value),
        _ => Err(format!("{text:?} is not a percentile; write numbers from 0 to 100, for example 50,90,99.9")),
    }
}

/// `99`, `99.9`: how a percentile is written in names.
pub fn label(percent: f64) -> String {
    format!("p{percent}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        let d = Distribution::of(vec![4.0, 1.0, 3.0, 2.0]).unwrap();
        // numpy.percentile([1, 2, 3, 4], [0, 25, 50, 90, 100])
        assert_eq!([0.0, 25.0, 50.0, 100.0].map(|p| d.at(p)), [1.0, 1.75, 2.5, 4.0]);
        assert!((d.at(90.0) - 3.7).abs() < 1e-12);
        assert_eq!((d.mean, d.median()), (2.5, 2.5));
        assert!((d.std - 1.118_033_988_749_895).abs() < 1e-12);
        assert_eq!(Distribution::of(vec![7.0]).unwrap().at(99.0), 7.0);
        assert_eq!(Distribution::of(Vec::new()), None);
    }

    #[test]
    fn percentiles_have_short_names() {
        assert_eq!((label(99.0), label(99.9)), ("p99".to_owned(), "p99.9".to_owned()));
        assert!(percent("100.1").is_err() && percent("x").is_err() && percent(" 50").is_ok());
    }
}
