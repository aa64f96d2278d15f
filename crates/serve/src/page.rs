//! Lists in pages, as OpenAI's: `limit`, `after`, `order`.
//! Refuses limits out of range and an `after` that is not in the list.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::errors::ApiError;
use crate::input::Asked;

/// What handlers take.
pub(crate) type PageQuery = Asked<HashMap<String, String>>;

/// Which part of a list is wanted.
pub(crate) struct Page {
    query: HashMap<String, String>,
    limit: usize,
}

impl Page {
    pub(crate) fn read(Asked(query): PageQuery, default: usize, most: usize) -> Result<Page, ApiError> {
        let limit = match query.get("limit") {
            None => default,
            Some(text) => text
                .parse()
                .ok()
                .filter(|limit| (1..=most).contains(limit))
                .ok_or_else(|| ApiError::field("limit", format!("expected a whole number from 1 to {most}")))?,
        };
        if let Some(order) = query.get("order").filter(|order| !["asc", "desc"].contains(&order.as_str())) {
            return Err(ApiError::field("order", format!("expected asc or desc, got {order:?}")));
        }
        Ok(Page { query, limit })
    }

    /// Another parameter of the query.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }

    /// The page of a list that has the newest entry first.
    pub(crate) fn cut<'a>(
        &self,
        entries: impl DoubleEndedIterator<Item = (&'a str, Value)>,
    ) -> Result<Value, ApiError> {
        let mut entries: Vec<(&str, Value)> = entries.collect();
        if self.get("order") == Some("asc") {
            entries.reverse();
        }
        let start = match self.get("after") {
            None => 0,
            Some(after) => {
                1 + entries
                    .iter()
                    .position(|(id, _)| *id == after)
                    .ok_or_else(|| ApiError::no_such("entry", after, "after"))?
            }
        };
        let rest = &entries[start..];
        let shown = &rest[..rest.len().min(self.limit)];
        Ok(json!({
            "object": "list", "data": shown.iter().map(|(_, value)| value).collect::<Vec<_>>(),
            "first_id": shown.first().map(|(id, _)| id), "last_id": shown.last().map(|(id, _)| id),
            "has_more": shown.len() < rest.len(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(pairs: &[(&str, &str)]) -> Result<Page, ApiError> {
        let query = pairs.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Page::read(Asked(query), 2, 3)
    }

    fn ids(pairs: &[(&str, &str)]) -> (Vec<String>, bool) {
        let list = page(pairs).unwrap().cut(["c", "b", "a"].into_iter().map(|id| (id, json!(id)))).unwrap();
        let data = list["data"].as_array().unwrap().iter().map(|id| id.as_str().unwrap().to_owned()).collect();
        (data, list["has_more"].as_bool().unwrap())
    }

    #[test]
    fn pages_follow_each_other() {
        assert_eq!(ids(&[]), (vec!["c".into(), "b".into()], true));
        assert_eq!(ids(&[("after", "b")]), (vec!["a".into()], false));
        assert_eq!(ids(&[("limit", "1"), ("order", "asc")]), (vec!["a".into()], true));
        assert_eq!(ids(&[("limit", "1"), ("order", "asc"), ("after", "a")]), (vec!["b".into()], true));
        assert_eq!(ids(&[("after", "a")]), (vec![], false));
        assert!(page(&[("after", "x")]).unwrap().cut([("a", json!(1))].into_iter()).is_err());
        for bad in [("limit", "0"), ("limit", "4"), ("limit", "x"), ("order", "up")] {
            assert_eq!(page(&[bad]).err().unwrap().param.as_deref(), Some(bad.0));
        }
    }
}
