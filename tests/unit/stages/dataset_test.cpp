#include "model/dataset.h"

#include <gmock/gmock.h>

#include "unit/stages/test_files.h"

namespace espalier {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string line(const std::string& id, const std::string& ids, const std::string& mask,
                 const std::string& extra = "") {
  return R"({"id":")" + id + R"(","domain":"code","mode":"chat","ids":)" + ids + R"(,"role_mask":)" + mask +
         R"(,"source":"s","licence":"MIT")" + extra + "}\n";
}

std::string error_of(const std::string& text) {
  const Result<Dataset> r = parse_dataset(text, "d.jsonl");
  return r.ok() ? "no error" : std::string(status_code_name(r.error().code())) + ": " + r.error().message();
}

TEST(Dataset, rows_are_read_with_every_field) {
  const Result<Dataset> r =
      parse_dataset(line("a", "[0,5,7]", "[0,1,2]", R"(,"effort":75)") + line("b", "[1]", "[3]"), "d");
  ASSERT_TRUE(r.ok()) << r.error().message();
  ASSERT_EQ(r->rows.size(), 2u);
  EXPECT_EQ(r->rows[0].id, "a");
  EXPECT_THAT(r->rows[0].ids, ElementsAre(0, 5, 7));
  EXPECT_THAT(r->rows[0].role_mask, ElementsAre(0, 1, 2));
  EXPECT_EQ(r->rows[0].effort, 75);
  EXPECT_EQ(r->n_tokens(), 4);
  EXPECT_THAT(r->domains(), ElementsAre("code"));
}

TEST(Dataset, a_written_file_reads_back_equal_and_keeps_its_content_hash) {
  const test::TempFolder dir;
  const Result<Dataset> first =
      parse_dataset(line("a", "[0, 5,7]", "[0,1,2]", R"(,"effort":null)") + line("ü\\n", "[1]", "[3]"), "d");
  ASSERT_TRUE(first.ok()) << first.error().message();
  ASSERT_TRUE(write_dataset(dir / "d.jsonl", first->rows).ok());
  const Result<Dataset> second = load_dataset(dir / "d.jsonl");
  ASSERT_TRUE(second.ok()) << second.error().message();
  EXPECT_EQ(second->rows[1].id, "ü\n");
  EXPECT_EQ(second->rows[0].ids, first->rows[0].ids);
  EXPECT_EQ(second->content_sha256, first->content_sha256);
  EXPECT_NE(second->sha256, first->sha256);  // the spelling differs
}

TEST(Dataset, the_content_hash_follows_ids_lengths_and_masks) {
  const auto hash = [](const std::string& text) { return parse_dataset(text, "d")->content_sha256; };
  const std::string base = hash(line("a", "[1,2]", "[0,1]"));
  EXPECT_EQ(base, hash(line("other name", "[1,2]", "[0,1]")));
  EXPECT_NE(base, hash(line("a", "[1,3]", "[0,1]")));
  EXPECT_NE(base, hash(line("a", "[1,2]", "[0,2]")));
  EXPECT_NE(base, hash(line("a", "[1]", "[0]") + line("b", "[2]", "[1]")));
}

TEST(Dataset, broken_files_are_refused_with_line_and_reason) {
  EXPECT_THAT(error_of(""), HasSubstr("data_loss: data set 'd.jsonl' has no rows"));
  EXPECT_THAT(error_of(line("a", "[1]", "[0]") + "{\"id\":\n"), HasSubstr("'d.jsonl' line 2"));
  EXPECT_THAT(error_of(line("a", "[1]", "[0]") + "\n"), HasSubstr("line 2: the line is blank"));
  EXPECT_THAT(error_of(line("a", "[]", "[]")), HasSubstr("row 'a' is empty"));
  EXPECT_THAT(error_of(line("a", "[1,2]", "[0]")), HasSubstr("'role_mask' has 1 entries, 'ids' has 2"));
  EXPECT_THAT(error_of(line("a", "[-1]", "[0]")),
              HasSubstr("'ids', entry 0: expected an integer in 0..2147483647, found -1"));
  EXPECT_THAT(error_of(line("a", "[1.5]", "[0]")), HasSubstr("found 1.5"));
  EXPECT_THAT(error_of(line("a", "[\"x\"]", "[0]")), HasSubstr("found \"x\""));
  EXPECT_THAT(error_of(line("a", "[2147483648]", "[0]")), HasSubstr("found 2147483648"));
  EXPECT_THAT(error_of(line("a", "[1]", "[4]")), HasSubstr("'role_mask', entry 0: expected an integer in 0..3"));
  EXPECT_THAT(error_of(line("a", "7", "[0]")), HasSubstr("expected an array"));
  EXPECT_THAT(error_of(line("a", "[1]", "[0]") + line("a", "[1]", "[0]")), HasSubstr("id 'a' occurs twice"));
  EXPECT_THAT(error_of("[1]\n"), HasSubstr("expected a JSON object"));
  EXPECT_THAT(error_of(R"({"id":"a","domain":"d","mode":"poem","ids":[1],"role_mask":[0],"source":"","licence":""})"),
              HasSubstr("expected raw, chat or think, found 'poem'"));
  EXPECT_THAT(error_of(R"({"id":"a","mode":"raw","ids":[1],"role_mask":[0],"source":"","licence":""})"),
              HasSubstr("field 'domain' is missing"));
  EXPECT_THAT(error_of(line("a", "[1]", "[0]", R"(,"effort":"high")")), HasSubstr("'effort': expected an integer"));
}

TEST(Dataset, ids_outside_the_vocabulary_and_rows_beyond_the_context_are_refused) {
  const Dataset d = parse_dataset(line("a", "[1,511,512]", "[0,0,0]"), "d").value();
  EXPECT_TRUE(check_dataset_fits(d, 513, 0, "d").ok());
  const Status s = check_dataset_fits(d, 512, 0, "d");
  EXPECT_EQ(s.code(), StatusCode::kDataLoss);
  EXPECT_THAT(s.message(), HasSubstr("row 'a': id 512 at position 2 is not below the model's vocabulary of 512"));
  EXPECT_THAT(check_dataset_fits(d, 513, 2, "d").message(), HasSubstr("has 3 tokens; the model's context is 2"));
}

TEST(Dataset, scored_positions_predict_assistant_or_raw_tokens_and_never_the_last) {
  DatasetRow row;
  row.ids = {0, 1, 2, 3, 4, 5};
  row.role_mask = {0, 0, 1, 2, 0, 3};
  EXPECT_THAT(scored_positions(row), ElementsAre(1, 2, 4));
  row.ids = {9};
  row.role_mask = {3};
  EXPECT_THAT(scored_positions(row), ElementsAre());
}

}  // namespace
}  // namespace espalier
